// What the kernels do with one row of a matrix. Only for the .cpp files that are compiled per instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "dtype.h"
#include "matrix_view.h"
#include "vector.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Columns that are worked on at a time: their accumulators stay in the first-level cache.
constexpr int64_t kColumnBlock = 256;

// Empty tensors have no memory: memcpy and memset must not see their null pointers.
template <class T>
MAXMOE_INLINE void copy_row(const T* source, T* target, int64_t count) {
  if (count > 0) std::memcpy(target, source, static_cast<size_t>(count) * sizeof(T));
}

template <class T>
MAXMOE_INLINE void zero_row(T* target, int64_t count) {
  if (count > 0) std::memset(static_cast<void*>(target), 0, static_cast<size_t>(count) * sizeof(T));
}

// How many elements there are before the first line of the caches that begins in a row.
template <class T>
MAXMOE_INLINE int64_t elements_to_line(const T* row) {
  const auto past_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(row) % kCacheLine);
  return past_line == 0 ? 0 : (kCacheLine - past_line) / static_cast<int64_t>(sizeof(T));
}

// target = source, past the caches where it covers their lines; see stream_vector.
template <class T>
MAXMOE_INLINE void stream_row(const T* source, T* target, int64_t count) {
  constexpr auto kLine = static_cast<int64_t>(kCacheLine / sizeof(T));
  int64_t i = at_most(elements_to_line(target), count);
  copy_row(source, target, i);
  for (; i + kLine <= count; i += kLine) {
#pragma GCC unroll 4
    for (int64_t part = 0; part < kLine; part += kVectorBytes / sizeof(T)) {
      Vector<uint32_t> vector;
      std::memcpy(&vector, source + i + part, sizeof(vector));
      stream_vector(target + i + part, vector);
    }
  }
  copy_row(source + i, target + i, count - i);
}

// No processor foresees where the next row is. A row that begins amid a line ends in one more.
template <class T>
MAXMOE_INLINE void prefetch_row(const T* row, int64_t columns) {
  for (int64_t c = 0; c < columns; c += kCacheLine / sizeof(T)) __builtin_prefetch(row + c);
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

// target = weight * source, in whole vectors; returns how many elements these are.
template <class T, bool kStreamed>
MAXMOE_INLINE int64_t scale_vectors(const T* source, Accumulator<T> weight, T* target, int64_t count) {
  constexpr int64_t kWidth = 2 * kLanes<Accumulator<T>>;
  int64_t i = 0;
  for (; i + kWidth <= count; i += kWidth) {
    const auto two = load_two(source + i);
    store_two_narrowed<T, kStreamed>(target + i, {weight * two.first, weight * two.second});
  }
  return i;
}

// target = weight * source; the last vectors overlap those before
template <class T>
MAXMOE_INLINE void scale_row(const T* source, Accumulator<T> weight, T* target, int64_t count) {
  constexpr int64_t kWidth = 2 * kLanes<Accumulator<T>>;
  const int64_t last = count - kWidth;
  int64_t i = scale_vectors<T, false>(source, weight, target, count);
  if (i < count && last >= 0) i = last + scale_vectors<T, false>(source + last, weight, target + last, kWidth);
  for (; i < count; ++i) target[i] = narrow<T>(weight * widen(source[i]));
}

// target = weight * source, past the caches where it covers their lines; see stream_vector.
template <class T>
MAXMOE_INLINE void stream_scaled_row(const T* source, Accumulator<T> weight, T* target, int64_t count) {
  constexpr int64_t kWidth = 2 * kLanes<Accumulator<T>>;
  constexpr auto kLine = static_cast<int64_t>(kCacheLine / sizeof(T));
  constexpr int64_t kWhole = kWidth < kLine ? kLine : kWidth;  // vectors that fill lines
  T part[kWhole];
  const int64_t scaled = at_most(count, kWhole);
  const int64_t begin = at_most(elements_to_line(target), count);
  const int64_t end = count - (count - begin) % kWhole;
  if (begin > 0) {
    scale_row(source, weight, part, scaled);
    copy_row(part, target, begin);
  }
  scale_vectors<T, true>(source + begin, weight, target + begin, end - begin);
  if (end < count) {
    scale_row(source + count - scaled, weight, part, scaled);
    copy_row(part + scaled - (count - end), target + end, count - end);
  }
}

// target = sum over i < count of weight_of(i) * rows[index_of(i)], in this order; a negative index is left out.
template <class T, class IndexOf, class WeightOf>
MAXMOE_INLINE void sum_weighted_rows(ConstMatrixView<T> rows, int64_t count, const IndexOf& index_of,
                                     const WeightOf& weight_of, T* target) {
  using S = Accumulator<T>;
  constexpr int64_t kWidth = 2 * kLanes<S>;
  int64_t column = 0;
  const auto block = [&]<int kTwos> {
    TwoVectors<S> sum[kTwos] = {};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t index = index_of(i);
      if (index < 0) continue;
      const T* row = rows.row(index) + column;
      const S weight = weight_of(i);
#pragma GCC unroll 4
      for (int v = 0; v < kTwos; ++v) {
        const TwoVectors<S> two = load_two(row + v * kWidth);
        sum[v] = {multiply_add<S>(sum[v].first, weight, two.first), multiply_add<S>(sum[v].second, weight, two.second)};
      }
    }
#pragma GCC unroll 4
    for (int v = 0; v < kTwos; ++v) store_two_narrowed<T>(target + column + v * kWidth, sum[v]);
    column += kTwos * kWidth;
  };
  while (column + 4 * kWidth <= rows.columns) block.template operator()<4>();  // a cache line or more of each row
  while (column + kWidth <= rows.columns) block.template operator()<1>();
  if (column == rows.columns) return;
  if (rows.columns >= kWidth) {  // the last vectors overlap those before
    column = rows.columns - kWidth;
    return block.template operator()<1>();
  }
  const int64_t few = at_most(rows.columns, kWidth);
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

// <a, b>, summed in a fixed order
template <class T>
MAXMOE_INLINE Accumulator<T> dot_rows(const T* a, const T* b, int64_t count) {
  using S = Accumulator<T>;
  constexpr int kSums = 2;
  constexpr int64_t kWidth = 2 * kLanes<S>;
  TwoVectors<S> sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kWidth <= count; i += kSums * kWidth) {
#pragma GCC unroll 2
    for (int v = 0; v < kSums; ++v) {
      const TwoVectors<S> left = load_two(a + i + v * kWidth);
      const TwoVectors<S> right = load_two(b + i + v * kWidth);
      sums[v] = {sums[v].first + left.first * right.first, sums[v].second + left.second * right.second};
    }
  }
  const Vector<S> sum = (sums[0].first + sums[0].second) + (sums[1].first + sums[1].second);
  S total = 0;
  for (int lane = 0; lane < kLanes<S>; ++lane) total += sum[lane];
  for (; i < count; ++i) total += widen(a[i]) * widen(b[i]);
  return total;
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
