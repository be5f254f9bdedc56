// The product of few rows of A with a row-major B. B is read once and in place: each of its elements is used so few
// times that packing it would cost more than it saves. Only for the .cpp files that are compiled per instruction set.
//
// The loops over columns and over the inner dimension are exchanged: blocks of a few rows of B outside, all columns
// inside, so that B is read in the order of memory, which hardware prefetchers follow and which misses the TLB least.
// The partial sums of C are loaded and stored once per block of rows of B; for few rows of C they stay in the first- or
// second-level cache.
#pragma once

#include "executor.h"
#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Rows of A that one micro-kernel takes: as many as leave registers for one VectorX2 of B.
constexpr int kMaxFewRows = kVectorRegisters == 32 ? 12 : 6;

// Rows of B in a block. Measured: 2 and 4 are as fast, and 16 slower for one row of A.
constexpr int64_t kFewRowsDepth = 8;

// c[kRows, kVectorsX2 * kLanesX2] = or += a * b, over `depth` rows of B. Columns of c are in the order of load_x2. As
// in micro_kernel, an element of c is one chain of multiply-adds along the inner dimension.
template <class T, int kRows, int kVectorsX2>
MAXMOE_INLINE void few_rows_micro_kernel(const Accumulator<T>* a, int64_t a_stride, const T* b, int64_t b_stride,
                                         int64_t depth, Accumulator<T>* c, int64_t c_stride, bool accumulate) {
  using S = Accumulator<T>;
  Vector<S> sum[kRows][2 * kVectorsX2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectorsX2; ++v) {
      sum[r][v] = accumulate ? load_vector(c + r * c_stride + v * kLanes<S>) : Vector<S>{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsX2; ++v) {
      const VectorX2<S> row_of_b = load_x2(b + k * b_stride + v * kLanesX2<S>);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const S factor = a[r * a_stride + k];
        sum[r][2 * v] = multiply_add(sum[r][2 * v], factor, row_of_b.first);
        sum[r][2 * v + 1] = multiply_add(sum[r][2 * v + 1], factor, row_of_b.second);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectorsX2; ++v) store_vector<S>(c + r * c_stride + v * kLanes<S>, sum[r][v]);
  }
}

// VectorX2 across the micro-kernel of `rows` rows: a power of two, as many as there are registers for, at most 4. One
// row then still has 8 accumulators to cover the latency of multiply-adds.
constexpr int few_rows_vectors_x2(int rows) {
  int vectors_x2 = 4;
  while (vectors_x2 > 1 && rows * vectors_x2 > kMaxFewRows) vectors_x2 /= 2;
  return vectors_x2;
}

// c = or += a * b, with c in the order of load_x2. While a micro-kernel runs, its columns of the next block of rows of
// B are prefetched.
template <class T, int kRows>
void multiply_few_rows(ConstMatrixView<Accumulator<T>> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> c,
                       bool accumulate) {
  constexpr int kWideX2 = few_rows_vectors_x2(kRows);
  constexpr int64_t kWideColumns = kWideX2 * kLanesX2<Accumulator<T>>;
  for (int64_t k = 0; k < b.rows; k += kFewRowsDepth) {
    const int64_t depth = at_most(b.rows - k, kFewRowsDepth);
    const int64_t next_depth = at_most(b.rows - k - depth, kFewRowsDepth);
    const bool has_sum = accumulate || k > 0;
    int64_t column = 0;
    const auto multiply_columns = [&]<int kVectorsX2> {
      constexpr int64_t kColumns = kVectorsX2 * kLanesX2<Accumulator<T>>;
      for (int64_t next = 0; next < next_depth; ++next) {
        prefetch_row(b.row(k + depth + next) + column, kColumns);
      }
      few_rows_micro_kernel<T, kRows, kVectorsX2>(a.data + k, a.row_stride, b.row(k) + column, b.row_stride, depth,
                                                  c.data + column, c.row_stride, has_sum);
      column += kColumns;
    };
    while (column + kWideColumns <= b.columns) multiply_columns.template operator()<kWideX2>();
    while (column < b.columns) multiply_columns.template operator()<1>();
  }
}

template <class T, int... kIndex>
void multiply_few_rows(ConstMatrixView<Accumulator<T>> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> c,
                       bool accumulate, std::integer_sequence<int, kIndex...> /*indices*/) {
  using Multiply = void (*)(ConstMatrixView<Accumulator<T>>, ConstMatrixView<T>, MatrixView<Accumulator<T>>, bool);
  static constexpr Multiply of_rows[] = {multiply_few_rows<T, kIndex + 1>...};
  of_rows[a.rows - 1](a, b, c, accumulate);
}

// c = a * b or c += a * b for 1 to kMaxFewRows rows, a and b row-major with at least one row of b, and a multiple of
// kLanesX2 columns. 16-bit types: a and c are converted as a whole, which are few, and b as it is loaded.
template <class T>
void multiply_few_rows(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<T> c, bool accumulate) {
  using S = Accumulator<T>;
  constexpr std::make_integer_sequence<int, kMaxFewRows> kIndices;
  if constexpr (std::is_same_v<T, S>) {
    multiply_few_rows<T>(a, b, c, accumulate, kIndices);
  } else {
    const MatrixView<S> wide_a{scratch<S>(kPackedAScratch, a.rows * a.columns), a.rows, a.columns, a.columns};
    for (int64_t r = 0; r < a.rows; ++r) widen_row(a.row(r), wide_a.row(r), a.columns);
    const MatrixView<S> wide_c{scratch<S>(kWideCScratch, c.rows * c.columns), c.rows, c.columns, c.columns};
    for (int64_t r = 0; r < c.rows && accumulate; ++r) {
      for (int64_t column = 0; column < c.columns; column += kLanesX2<S>) {
        const VectorX2<S> x2 = load_x2(c.row(r) + column);
        store_vector(wide_c.row(r) + column, x2.first);
        store_vector(wide_c.row(r) + column + kLanes<S>, x2.second);
      }
    }
    multiply_few_rows<T>(wide_a.as_const(), b, wide_c, accumulate, kIndices);
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t column = 0; column < c.columns; column += kLanesX2<S>) {
        const S* sums = wide_c.row(r) + column;
        store_narrowed_x2<T>(c.row(r) + column, {load_vector(sums), load_vector(sums + kLanes<S>)});
      }
    }
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
