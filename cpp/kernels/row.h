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

// No processor foresees where the next row is.
template <class T>
MAXMOE_INLINE void prefetch_row(const T* row, int64_t columns) {
  constexpr int64_t kCacheLine = 64 / sizeof(T);
  for (int64_t c = 0; c < columns; c += kCacheLine) __builtin_prefetch(row + c);
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

// target = weight * source
template <class T>
MAXMOE_INLINE void scale_row(const T* source, Accumulator<T> weight, T* target, int64_t count) {
  using S = Accumulator<T>;
  int64_t i = 0;
  for (; i + kLanes<S> <= count; i += kLanes<S>) store_narrowed<T>(target + i, weight * load_vector(source + i));
  for (; i < count; ++i) target[i] = narrow<T>(weight * widen(source[i]));
}

// target = sum over i < count of weight_of(i) * rows[index_of(i)], in this order; a negative index is left out.
template <class T, class IndexOf, class WeightOf>
MAXMOE_INLINE void sum_weighted_rows(ConstMatrixView<T> rows, int64_t count, const IndexOf& index_of,
                                     const WeightOf& weight_of, T* target) {
  using S = Accumulator<T>;
  constexpr int kVectorsAtOnce = 8;  // a cache line or more of each row
  const int64_t columns = rows.columns;
  int64_t column = 0;
  for (; column + kVectorsAtOnce * kLanes<S> <= columns; column += kVectorsAtOnce * kLanes<S>) {
    Vector<S> sum[kVectorsAtOnce] = {};
    for (int64_t i = 0; i < count; ++i) {
      const int64_t index = index_of(i);
      if (index < 0) continue;
      const T* row = rows.row(index);
      const S weight = weight_of(i);
#pragma GCC unroll 8
      for (int v = 0; v < kVectorsAtOnce; ++v) {
        sum[v] = multiply_add<S>(sum[v], weight, load_vector(row + column + v * kLanes<S>));
      }
    }
#pragma GCC unroll 8
    for (int v = 0; v < kVectorsAtOnce; ++v) store_narrowed<T>(target + column + v * kLanes<S>, sum[v]);
  }
  const int64_t rest = columns - column;
  S sum[kVectorsAtOnce * kLanes<S>] = {};
  for (int64_t i = 0; i < count && rest > 0; ++i) {
    const int64_t index = index_of(i);
    if (index < 0) continue;
    const T* row = rows.row(index);
    const S weight = weight_of(i);
    for (int64_t c = 0; c < rest; ++c) sum[c] += weight * widen(row[column + c]);
  }
  narrow_row<T>(sum, target + column, rest);
}

// <a, b>, summed in a fixed order
template <class T>
MAXMOE_INLINE Accumulator<T> dot_rows(const T* a, const T* b, int64_t count) {
  using S = Accumulator<T>;
  constexpr int kSums = 4;
  Vector<S> sums[kSums] = {};
  int64_t i = 0;
  for (; i + kSums * kLanes<S> <= count; i += kSums * kLanes<S>) {
#pragma GCC unroll 4
    for (int v = 0; v < kSums; ++v) sums[v] += load_vector(a + i + v * kLanes<S>) * load_vector(b + i + v * kLanes<S>);
  }
  const Vector<S> sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
  S total = 0;
  for (int lane = 0; lane < kLanes<S>; ++lane) total += sum[lane];
  for (; i < count; ++i) total += widen(a[i]) * widen(b[i]);
  return total;
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
