// The product of few rows with a row-major matrix, which is read once and where it lies: copying it to panels would
// cost more than it gives. Only for the .cpp files that are compiled per instruction set.
//
// Some rows of b are read at a time, from their first column to their last, so that memory is read in its own order.
// The sums of all columns stay in the first-level cache meanwhile.
#pragma once

#include "executor.h"
#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

constexpr int kFewRows = kVectorRegisters == 32 ? 12 : 6;

// Rows of b that are read at a time.
constexpr int64_t kRowsAtATime = 8;

// Columns that fill the vectors of few_rows_block. Those past the last multiple of it are left to others.
template <class S>
constexpr int64_t kColumnsInPlace = 2 * kLanes<S>;

// c[kRows, kTwos * kColumnsInPlace] = or += a * b, over `depth` rows of b; columns of c in the order of load_two
template <class T, int kRows, int kTwos>
MAXMOE_INLINE void few_rows_block(const Accumulator<T>* a, int64_t a_stride, const T* b, int64_t b_stride,
                                  int64_t depth, Accumulator<T>* c, int64_t c_stride, bool accumulate) {
  using S = Accumulator<T>;
  Vector<S> sum[kRows][2 * kTwos];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kTwos; ++v) {
      sum[r][v] = accumulate ? load_vector(c + r * c_stride + v * kLanes<S>) : Vector<S>{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
#pragma GCC unroll 4
    for (int two = 0; two < kTwos; ++two) {
      const TwoVectors<S> row_of_b = load_two(b + k * b_stride + two * kColumnsInPlace<S>);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const S factor = a[r * a_stride + k];
        sum[r][2 * two] = multiply_add(sum[r][2 * two], factor, row_of_b.first);
        sum[r][2 * two + 1] = multiply_add(sum[r][2 * two + 1], factor, row_of_b.second);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kTwos; ++v) store_vector<S>(c + r * c_stride + v * kLanes<S>, sum[r][v]);
  }
}

// Two vectors across a block: as many as there are registers for, at most 4.
constexpr int twos_in_place(int rows) {
  int twos = 4;
  while (twos > 1 && rows * twos > kFewRows) twos /= 2;
  return twos;
}

// c = or += a * b, columns of c in the order of load_two
template <class T, int kRows>
void multiply_few_rows(ConstMatrixView<Accumulator<T>> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> c,
                       bool accumulate) {
  constexpr int kTwos = twos_in_place(kRows);
  constexpr int64_t kLongWidth = kTwos * kColumnsInPlace<Accumulator<T>>;
  for (int64_t k = 0; k < b.rows; k += kRowsAtATime) {
    const int64_t depth = at_most(b.rows - k, kRowsAtATime);
    const int64_t rows_ahead = at_most(b.rows - k - depth, kRowsAtATime);
    const bool has_sum = accumulate || k > 0;
    int64_t column = 0;
    const auto block = [&]<int kBlockTwos> {
      constexpr int64_t kBlockWidth = kBlockTwos * kColumnsInPlace<Accumulator<T>>;
      for (int64_t next = 0; next < rows_ahead; ++next) {
        prefetch_row(b.row(k + depth + next) + column, kBlockWidth);
      }
      few_rows_block<T, kRows, kBlockTwos>(a.data + k, a.row_stride, b.row(k) + column, b.row_stride, depth,
                                           c.data + column, c.row_stride, has_sum);
      column += kBlockWidth;
    };
    while (column + kLongWidth <= b.columns) block.template operator()<kTwos>();
    while (column < b.columns) block.template operator()<1>();
  }
}

template <class T, int... kIndex>
void multiply_few_rows(ConstMatrixView<Accumulator<T>> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> c,
                       bool accumulate, std::integer_sequence<int, kIndex...> /*heights*/) {
  using Multiply = void (*)(ConstMatrixView<Accumulator<T>>, ConstMatrixView<T>, MatrixView<Accumulator<T>>, bool);
  static constexpr Multiply of_height[] = {multiply_few_rows<T, kIndex + 1>...};
  of_height[a.rows - 1](a, b, c, accumulate);
}

// c = a * b or c += a * b for 1 to kFewRows rows, a and b row-major with at least one row of b, and a multiple of
// kColumnsInPlace columns.
template <class T>
void multiply_few_rows(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<T> c, bool accumulate) {
  using S = Accumulator<T>;
  constexpr std::make_integer_sequence<int, kFewRows> kHeights;
  if constexpr (std::is_same_v<T, S>) {
    multiply_few_rows<T>(a, b, c, accumulate, kHeights);
  } else {
    const MatrixView<S> left{scratch<S>(kGemmScratch, a.rows * a.columns), a.rows, a.columns, a.columns};
    for (int64_t r = 0; r < a.rows; ++r) widen_row(a.row(r), left.row(r), a.columns);
    const MatrixView<S> sum{scratch<S>(kGemmScratch + 2, c.rows * c.columns), c.rows, c.columns, c.columns};
    for (int64_t r = 0; r < c.rows && accumulate; ++r) {
      for (int64_t column = 0; column < c.columns; column += kColumnsInPlace<S>) {
        const TwoVectors<S> two = load_two(c.row(r) + column);
        store_vector(sum.row(r) + column, two.first);
        store_vector(sum.row(r) + column + kLanes<S>, two.second);
      }
    }
    multiply_few_rows<T>(left.as_const(), b, sum, accumulate, kHeights);
    for (int64_t r = 0; r < c.rows; ++r) {
      for (int64_t column = 0; column < c.columns; column += kColumnsInPlace<S>) {
        const S* of_row = sum.row(r) + column;
        store_two_narrowed<T>(c.row(r) + column, {load_vector(of_row), load_vector(of_row + kLanes<S>)});
      }
    }
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
