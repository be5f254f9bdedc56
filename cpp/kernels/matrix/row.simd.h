// Operations on rows of matrices: copy, convert, scale, sum, dot product, prefetch.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "kernels/isa/vector.simd.h"
#include "kernels/matrix/dtype.h"
#include "kernels/matrix/matrix_view.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Number of columns of a row that are processed at a time: at most 2 KiB in the accumulator's type, so that several
// such buffers fit into a first-level cache of 32 KiB.
constexpr int64_t kColumnBlock = 256;

// The pointer of an empty tensor is null, which memcpy and memset must not be given even for 0 bytes.
template <class T>
MAXMOE_INLINE void copy_row(const T* source, T* target, int64_t count) {
  if (count > 0) std::memcpy(target, source, static_cast<size_t>(count) * sizeof(T));
}

template <class T>
MAXMOE_INLINE void zero_row(T* target, int64_t count) {
  if (count > 0) std::memset(static_cast<void*>(target), 0, static_cast<size_t>(count) * sizeof(T));
}

// Number of elements of T in a cache line.
template <class T>
constexpr auto kCacheLineElements = static_cast<int64_t>(kCacheLineBytes / sizeof(T));

// The stride of rows of `size` elements that are read at the same time: an odd number of cache lines, so that they do
// not share a few sets of the first-level cache.
template <class Element>
constexpr int64_t padded_stride(int64_t size) {
  const int64_t lines = (size * int64_t{sizeof(Element)} + kCacheLineBytes - 1) / kCacheLineBytes;
  return (lines | 1) * kCacheLineElements<Element>;
}

// Number of elements of a row before the first cache line that begins in it.
template <class T>
MAXMOE_INLINE int64_t elements_to_cache_line(const T* row) {
  const auto past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) % kCacheLineBytes);
  return past_line == 0 ? 0 : (kCacheLineBytes - past_line) / static_cast<int64_t>(sizeof(T));
}

// target = source. Cache lines that the row covers completely are written with non-temporal stores
// (store_vector_nontemporal). The parts of lines at its ends are not, because those lines also hold elements of the
// rows beside it.
template <class T>
MAXMOE_INLINE void copy_row_nontemporal(const T* source, T* target, int64_t count) {
  constexpr int64_t kLine = kCacheLineElements<T>;
  int64_t i = at_most(elements_to_cache_line(target), count);
  copy_row(source, target, i);
  for (; i + kLine <= count; i += kLine) {
    // The vectors of a line are stored one after the other, so that the processor combines them to one write of the
    // line. 4 is the largest number of vectors in a line.
#pragma GCC unroll 4
    for (int64_t part = 0; part < kLine; part += kVectorBytes / sizeof(T)) {
      Vector<uint32_t> vector;
      std::memcpy(&vector, source + i + part, sizeof(vector));
      store_vector_nontemporal(target + i + part, vector);
    }
  }
  copy_row(source + i, target + i, count - i);
}

// Prefetches all cache lines of a row. Hardware prefetchers follow consecutive lines and constant strides, but not to a
// row that is selected by an index or that is a page away. The second prefetch is for a row that does not begin on a
// cache line, which ends in one more line.
template <class T>
MAXMOE_INLINE void prefetch_row(const T* row, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kCacheLineBytes / sizeof(T)) __builtin_prefetch(row + c);
  __builtin_prefetch(row + columns - 1);
}

// target = widen(source)
template <class T>
MAXMOE_INLINE void widen_row(const T* __restrict source, Accumulator<T>* __restrict target, int64_t count) {
  using S = Accumulator<T>;
  int64_t i = 0;
  for (; i + kLanes<S> <= count; i += kLanes<S>) store_vector<S>(target + i, load_vector(source + i));
  for (; i < count; ++i) target[i] = widen(source[i]);
}

// target = narrow(source)
template <class T>
MAXMOE_INLINE void narrow_row(const Accumulator<T>* __restrict source, T* __restrict target, int64_t count) {
  using S = Accumulator<T>;
  int64_t i = 0;
  for (; i + kLanes<S> <= count; i += kLanes<S>) store_narrowed(target + i, load_vector(source + i));
  for (; i < count; ++i) target[i] = narrow<T>(source[i]);
}

// target = weight * source for the elements that fill vectors. Returns the number of these elements.
template <class T, bool kNonTemporal>
MAXMOE_INLINE int64_t scale_whole_vectors(const T* source, Accumulator<T> weight, T* target, int64_t count) {
  constexpr int64_t kWidth = kLanesX2<Accumulator<T>>;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const auto x2 = load_x2(source + i);
    store_narrowed_x2<T, kNonTemporal>(target + i, {weight * x2.first, weight * x2.second});
  }
  return i;
}

// target = weight * source. The last elements are computed in vectors that end with the row. They overlap the previous
// vectors and store the same values again. Only a row that is shorter than kWidth takes the scalar loop.
template <class T>
MAXMOE_INLINE void scale_row(const T* source, Accumulator<T> weight, T* target, int64_t count) {
  constexpr int64_t kWidth = kLanesX2<Accumulator<T>>;
  const int64_t last = count - kWidth;
  int64_t i = scale_whole_vectors<T, false>(source, weight, target, count);
  if (i < count && last >= 0) i = last + scale_whole_vectors<T, false>(source + last, weight, target + last, kWidth);
  for (; i < count; ++i) target[i] = narrow<T>(weight * widen(source[i]));
}

// target = weight * source, with non-temporal stores as in copy_row_nontemporal. The ends of the row are scaled in a
// buffer, in whole vectors, and copied from there.
template <class T>
MAXMOE_INLINE void scale_row_nontemporal(const T* source, Accumulator<T> weight, T* target, int64_t count) {
  constexpr int64_t kWidth = kLanesX2<Accumulator<T>>;
  constexpr int64_t kWhole =
      kWidth < kCacheLineElements<T> ? kCacheLineElements<T> : kWidth;  // whole lines and whole vectors
  T part[kWhole];
  const int64_t scaled = at_most(count, kWhole);
  const int64_t begin = at_most(elements_to_cache_line(target), count);
  const int64_t end = count - (count - begin) % kWhole;
  if (begin > 0) {
    scale_row(source, weight, part, scaled);
    copy_row(part, target, begin);
  }
  scale_whole_vectors<T, true>(source + begin, weight, target + begin, end - begin);
  if (end < count) {
    scale_row(source + count - scaled, weight, part, scaled);
    copy_row(part + scaled - (count - end), target + end, count - end);
  }
}

// target = sum over i < count of weight_of(i) * rows[index_of(i)], in this order; negative indices are skipped. The
// accumulators of a block of columns stay in registers while all rows are read, so that no partial sum is stored.
// Every column has a separate accumulator, so that its bits do not depend on the block that contains it. The loops over
// the vectors of a block are unrolled: the compiler keeps an array in registers only if all of its indices are
// constants.
template <class T, class IndexOf, class WeightOf>
MAXMOE_INLINE void sum_weighted_rows(ConstMatrixView<T> rows, int64_t count, const IndexOf& index_of,
                                     const WeightOf& weight_of, T* target) {
  using S = Accumulator<T>;
  constexpr int64_t kWidth = kLanesX2<S>;
  int64_t column = 0;
  const auto block = [&]<int kVectorsX2> {
    VectorX2<S> sum[kVectorsX2] = {};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t index = index_of(i);
      if (index < 0) continue;
      const T* row = rows.row(index) + column;
      const S weight = weight_of(i);
#pragma GCC unroll 4
      for (int v = 0; v < kVectorsX2; ++v) {
        const VectorX2<S> x2 = load_x2(row + v * kWidth);
        sum[v] = {multiply_add<S>(sum[v].first, weight, x2.first), multiply_add<S>(sum[v].second, weight, x2.second)};
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsX2; ++v) store_narrowed_x2<T>(target + column + v * kWidth, sum[v]);
    column += kVectorsX2 * kWidth;
  };
  // Wide blocks read at least a cache line of each row at a time, and have 8 independent accumulators.
  while (column + 4 * kWidth <= rows.columns) block.template operator()<4>();
  while (column + kWidth <= rows.columns) block.template operator()<1>();
  if (column == rows.columns) return;
  if (rows.columns >= kWidth) {  // the last vectors overlap the previous ones, and store the same values again
    column = rows.columns - kWidth;
    return block.template operator()<1>();
  }
  // A row shorter than two vectors has scalar accumulators, one per column.
  const int64_t few = at_most(rows.columns, kWidth);  // all columns: the limit is known to the compiler
  S sum[kWidth] = {};
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = index_of(i);
    if (index < 0) continue;
    const T* row = rows.row(index);
    const S weight = weight_of(i);
    for (int64_t c = 0; c < few; ++c) sum[c] += weight * widen(row[c]);
  }
  for (int64_t c = 0; c < few; ++c) target[c] = narrow<T>(sum[c]);
}

// Dot product of two rows. The order of summation depends only on `count` and the width of vectors, so that the result
// is bitwise reproducible. The loop over `sums` is unrolled, so that they stay in registers.
template <class T>
MAXMOE_INLINE Accumulator<T> dot_rows(const T* a, const T* b, int64_t count) {
  using S = Accumulator<T>;
  constexpr int kSums = 2;  // with two vectors each: four chains of multiply-adds, to cover their latency
  constexpr int64_t kWidth = kLanesX2<S>;
  VectorX2<S> sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kWidth <= count; i += kSums * kWidth) {
#pragma GCC unroll 2
    for (int v = 0; v < kSums; ++v) {
      const VectorX2<S> left = load_x2(a + i + v * kWidth);
      const VectorX2<S> right = load_x2(b + i + v * kWidth);
      sums[v] = {sums[v].first + left.first * right.first, sums[v].second + left.second * right.second};
    }
  }
  // The accumulators are added pairwise, then the lanes in order, then the elements that fill no vector.
  const Vector<S> sum = (sums[0].first + sums[0].second) + (sums[1].first + sums[1].second);
  S total = 0;
  for (int lane = 0; lane < kLanes<S>; ++lane) total += sum[lane];
  for (; i < count; ++i) total += widen(a[i]) * widen(b[i]);
  return total;
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
