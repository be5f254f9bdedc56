// The product of few rows of A with any B. B is read once and in place: each of its elements is used so few times that
// packing it would cost more than it saves. Only for the .cpp files that are compiled per instruction set.
//
// B row-major: the loops over columns and over the inner dimension are exchanged. Blocks of a few rows of B outside,
// all columns inside, so that B is read in the order of memory, which hardware prefetchers follow and which misses the
// TLB least. The partial sums of C are loaded and stored once per block of rows of B; for few rows of C they stay in
// the first- or second-level cache.
//
// B transposed: as many columns as a vector has lanes, rows in memory, are transposed block by block in registers, and
// multiplied there.
//
// An element of C is the same chain of multiply-adds as in a micro-kernel.
#pragma once

#include "executor.h"
#include "pack.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Rows of A that one kernel takes: as many as leave registers for two vectors of B.
constexpr int kMaxFewRows = kVectorRegisters == 32 ? 12 : 6;

// Rows of B in a block of a row-major B. Measured: 2 and 4 are as fast, and 16 slower for one row of A.
constexpr int64_t kFewRowsDepth = 8;

// How far ahead a row-major B is prefetched, in bytes; at least one block. A block of narrow rows is read in less time
// than memory takes to answer.
constexpr int64_t kFewRowsPrefetchBytes = int64_t{8} * 1024;

// Few rows of A, one after the other, in steps.
template <class Element>
struct FewRows {
  const Element* data;
  int64_t num_steps;
  MAXMOE_INLINE Element operator()(int r, int64_t step) const { return data[r * num_steps + step]; }
};

// sums[kRows, kVectorsX2 * NR] = or += a * b for a block of rows of B. Columns of the sums are in the order of
// VectorX2.
template <class T, class Element, int kRows, int kVectorsX2>
MAXMOE_INLINE void multiply_few_rows_block(FewRows<Element> a, ConstMatrixView<T> b, Range depth, Accumulator<T>* sums,
                                           int64_t sums_stride, bool accumulate) {
  using S = Accumulator<T>;
  Vector<S> sum[kRows][2 * kVectorsX2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectorsX2; ++v) {
      sum[r][v] = accumulate ? load_vector(sums + r * sums_stride + v * kLanes<S>) : Vector<S>{};
    }
  }
  for (int64_t d = depth.begin; d < depth.end; d += kDepthPerStep<Element>) {
    const T* row = b.row(d);
    const T* next = d + 1 < depth.end ? row + b.row_stride : nullptr;
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsX2; ++v) {
      const StepX2<Element> step = load_step<Element>(row + v * kNR<S>, next == nullptr ? nullptr : next + v * kNR<S>);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const Element factor = a(r, d / kDepthPerStep<Element>);
        sum[r][2 * v] = multiply_add(sum[r][2 * v], factor, step.first);
        sum[r][2 * v + 1] = multiply_add(sum[r][2 * v + 1], factor, step.second);
      }
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectorsX2; ++v) store_vector<S>(sums + r * sums_stride + v * kLanes<S>, sum[r][v]);
  }
}

// VectorX2 across the kernel of `rows` rows: a power of two, as many as there are registers for, at most 4. One row
// then still has 8 accumulators to cover the latency of multiply-adds.
constexpr int few_rows_vectors_x2(int rows) {
  int vectors_x2 = 4;
  while (vectors_x2 > 1 && rows * vectors_x2 > kMaxFewRows) vectors_x2 /= 2;
  return vectors_x2;
}

// For a row-major b. While a block is multiplied, its columns of a later block of rows of B are prefetched; after the
// last one, those of the next product.
template <class T, class Element, int kRows>
void multiply_few_rows_row_major(FewRows<Element> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> sums,
                                 bool accumulate, ConstMatrixView<T> next_b) {
  constexpr int kWideX2 = few_rows_vectors_x2(kRows);
  constexpr int64_t kWideColumns = kWideX2 * kNR<Accumulator<T>>;
  const int64_t rows_ahead =
      (kFewRowsPrefetchBytes / (b.columns * int64_t{sizeof(T)}) / kFewRowsDepth + 1) * kFewRowsDepth;
  for (int64_t d = 0; d < b.rows; d += kFewRowsDepth) {
    const Range depth = range_from(d, kFewRowsDepth, b.rows);
    // Past the last row they are those of the next product.
    const int64_t ahead = d + rows_ahead;
    const ConstMatrixView<T> next = ahead < b.rows
                                        ? b.row_range(ahead, b.rows)
                                        : next_b.row_range(at_most(ahead - b.rows, next_b.rows), next_b.rows);
    const int64_t next_rows = at_most(next.rows, kFewRowsDepth);
    int64_t column = 0;
    const auto multiply_columns = [&]<int kVectorsX2> {
      constexpr int64_t kColumns = kVectorsX2 * kNR<Accumulator<T>>;
      for (int64_t row = 0; row < next_rows; ++row) prefetch_row(next.row(row) + column, kColumns);
      multiply_few_rows_block<T, Element, kRows, kVectorsX2>(a, b.column_range(column, column + kColumns), depth,
                                                             sums.data + column, sums.row_stride, accumulate || d > 0);
      column += kColumns;
    };
    while (column + kWideColumns <= b.columns) multiply_columns.template operator()<kWideX2>();
    while (column < b.columns) multiply_columns.template operator()<1>();
  }
}

// The rows of a panel that one vector of a micro-panel holds, kLanes steps of them from column d on: transposed, so
// that a vector is a step. The same block of `next` is prefetched.
template <class T, class Element>
MAXMOE_INLINE void load_transposed_block(ConstMatrixView<T> panel, ConstMatrixView<T> next, int vector, int64_t d,
                                         Vector<Element> (&block)[kLanes<Element>]) {
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes<Element>; ++lane) {
    const int64_t row = column_of_lane<T>(vector, lane);
    __builtin_prefetch(next.row(row) + d, /*write*/ 0, /*locality: L2*/ 2);
    block[lane] = load_along_depth<Element>(panel.row(row) + d, panel.columns - d);
  }
  transpose_square<Element>(block);
}

// sums[kRows, kLanes] = or += a * b for one vector of a transposed b.
template <class T, class Element, int kRows>
MAXMOE_INLINE void multiply_few_rows_vector(FewRows<Element> a, ConstMatrixView<T> panel, ConstMatrixView<T> next,
                                            int vector, Accumulator<T>* sums, int64_t sums_stride, bool accumulate) {
  using S = Accumulator<T>;
  constexpr int64_t kDepth = kLanes<Element> * kDepthPerStep<Element>;
  Vector<S> sum[kRows];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) sum[r] = accumulate ? load_vector(sums + r * sums_stride) : Vector<S>{};
  for (int64_t d = 0; d < panel.columns; d += kDepth) {
    Vector<Element> block[kLanes<Element>];
    load_transposed_block<T, Element>(panel, next, vector, d, block);
    const auto multiply_step = [&](int64_t step) {
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        sum[r] = multiply_add(sum[r], a(r, d / kDepthPerStep<Element> + step), block[step]);
      }
    };
    if (d + kDepth <= panel.columns) {
#pragma GCC unroll 16
      for (int step = 0; step < kLanes<Element>; ++step) multiply_step(step);
    } else {
      for (int64_t step = 0; step < steps_of_depth<Element>(panel.columns - d); ++step) multiply_step(step);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) store_vector<S>(sums + r * sums_stride, sum[r]);
}

// For a transposed b, whose columns are the rows of `memory`. While some are multiplied, the next ones are prefetched,
// at the end those of the next product.
template <class T, class Element, int kRows>
void multiply_few_rows_transposed(FewRows<Element> a, ConstMatrixView<T> memory, MatrixView<Accumulator<T>> sums,
                                  bool accumulate, ConstMatrixView<T> next_memory) {
  using S = Accumulator<T>;
  for (int64_t first = 0; first < memory.rows; first += kNR<S>) {
    const ConstMatrixView<T> panel = memory.row_range(first, memory.rows);
    // Where nothing comes after it, memory past its end: a prefetch never faults.
    const bool is_last = first + kNR<S> >= memory.rows && next_memory.rows >= kNR<S>;
    const ConstMatrixView<T> next = is_last ? next_memory : memory.row_range(first + kNR<S>, memory.rows);
#pragma GCC unroll 2
    for (int vector = 0; vector < 2; ++vector) {
      S* const of_vector = sums.data + first + vector * kLanes<S>;
      multiply_few_rows_vector<T, Element, kRows>(a, panel, next, vector, of_vector, sums.row_stride, accumulate);
    }
  }
}

// The kernel of as many rows as there are sums.
template <class T, class Element, int... kIndex>
void multiply_few_rows(FewRows<Element> a, const Product<T>& p, MatrixView<Accumulator<T>> sums,
                       std::integer_sequence<int, kIndex...> /*indices*/) {
  const ConstMatrixView<T> next = GemmOperand<T>(p.next_b).memory;
  const auto multiply = [&]<int kRows> {
    if (p.b.is_transposed) {
      multiply_few_rows_transposed<T, Element, kRows>(a, p.b.memory, sums, p.accumulate, next);
    } else {
      multiply_few_rows_row_major<T, Element, kRows>(a, p.b.memory, sums, p.accumulate, next);
    }
    return true;
  };
  static_cast<void>(((sums.rows == kIndex + 1 && multiply.template operator()<kIndex + 1>()) || ...));
}

// The steps of kLanes elements of one row of A, from depth d on.
template <class Element, class T>
MAXMOE_INLINE Vector<Element> load_row_of_a(const GemmOperand<T>& a, int64_t row, int64_t d) {
  constexpr int64_t kDepth = kLanes<Element> * kDepthPerStep<Element>;
  const int64_t depth = a.columns() - d;
  if (!a.is_transposed) return load_along_depth<Element>(a.memory_row(row) + d, depth);
  T elements[kDepth];
  for (int64_t i = 0; i < at_most(kDepth, depth); ++i) elements[i] = a.memory_row(d + i)[row];
  return load_along_depth<Element>(elements, depth);
}

// A product of 1 to kMaxFewRows rows, b without an index, with a depth of at least 1 and a multiple of NR columns.
template <class Element, class T>
void multiply_few_rows(const GemmOperand<T>& a, const Product<T>& p) {
  using S = Accumulator<T>;
  constexpr std::make_integer_sequence<int, kMaxFewRows> kIndices;
  const MatrixView<T>& c = p.c;
  const int64_t num_steps = steps_of_depth<Element>(a.columns());
  // The slot of B, which is not packed here. Whole vectors are stored.
  Element* const rows = scratch<Element>(kPackedBScratch, c.rows * num_steps + kLanes<Element>);
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t k = 0; k < num_steps; k += kLanes<Element>) {
      store_vector(rows + r * num_steps + k, load_row_of_a<Element>(a, r, k * kDepthPerStep<Element>));
    }
  }
  const MatrixView<S> sums{scratch<S>(kSumsScratch, c.rows * c.columns), c.rows, c.columns, c.columns};
  for (int64_t r = 0; r < c.rows && p.accumulate; ++r) {
    for (int64_t column = 0; column < c.columns; column += kNR<S>) {
      store_narrowed_x2<S>(sums.row(r) + column, load_x2(c.row(r) + column));
    }
  }
  multiply_few_rows<T>(FewRows<Element>{rows, num_steps}, p, sums, kIndices);
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t column = 0; column < c.columns; column += kNR<S>) {
      const S* of_row = sums.row(r) + column;
      store_narrowed_x2<T>(c.row(r) + column, {load_vector(of_row), load_vector(of_row + kLanes<S>)});
    }
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
