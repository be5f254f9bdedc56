// The product of few rows of A with any B. B is read in place: each of its elements is multiplied with so few elements
// of A that packing it would cost more than it saves. The product is bound by the bandwidth of memory, and each element
// of B is read once. Only for the .cpp files that are compiled per instruction set.
//
// If B is row-major, the loops over columns and over the inner dimension are exchanged. The outer loop runs over blocks
// of a few rows of B, the inner one over all columns. B is then read in the order of memory, which hardware prefetchers
// follow and which has the fewest TLB misses. The partial sums of C are loaded and stored once per block of rows of B.
// C has few rows, so that its sums stay in the first- or second-level cache.
//
// If B is transposed, its columns are rows in memory. As many columns as a vector has lanes are transposed in
// registers, block by block, and multiplied there.
//
// An element of C is the same chain of multiply-adds as in a micro-kernel, so that its bits do not depend on which of
// the two computes it.
#pragma once

#include "few_quantized_rows.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Number of rows of B in a block of a row-major B. 2 and 4 rows showed no consistent difference; 16 and 32 rows took up
// to 1.5 times the time for 1 to 6 rows of A (docs/performance.md).
constexpr int64_t kFewRowsDepth = 8;

// Prefetch distance of a row-major B in bytes, rounded up to whole blocks. A block of narrow rows is multiplied in less
// time than a cache miss takes. Without prefetching, 4 rows of A and more took 2 to 4 times the time, and longer
// distances gave no gain (docs/performance.md).
constexpr int64_t kFewRowsPrefetchBytes = int64_t{8} * 1024;

// Computes sums[kRows, kVectorsX2 * NR] = a * b, or += if `accumulate`, for one block of rows of B. The columns of the
// sums are in the order of VectorX2.
//
// The loops over `sum` are unrolled completely: 12 is the largest kRows, 8 the largest number of vectors. The compiler
// keeps an array in registers only if all of its indices are constants.
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
    // The second row of a step of pairs. A missing one counts as zeros.
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

// The product with a row-major b. While a block of rows of b is multiplied, the same columns of a later block are
// prefetched. At the end of b, the rows of the next product are prefetched.
template <class T, class Element, int kRows>
void multiply_few_rows_row_major(FewRows<Element> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> sums,
                                 bool accumulate, ConstMatrixView<T> next_b) {
  constexpr int kWideX2 = few_rows_vectors_x2(kRows);
  constexpr int64_t kWideColumns = kWideX2 * kNR<Accumulator<T>>;
  // The prefetch distance in rows.
  const int64_t rows_ahead =
      (kFewRowsPrefetchBytes / (b.columns * int64_t{sizeof(T)}) / kFewRowsDepth + 1) * kFewRowsDepth;
  for (int64_t d = 0; d < b.rows; d += kFewRowsDepth) {
    const Range depth = range_from(d, kFewRowsDepth, b.rows);
    // Past the last row of b, the rows of the next product are prefetched.
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
    // The loop over columns is inside, so that b is read row block by row block: see the top of the file.
    while (column + kWideColumns <= b.columns) multiply_columns.template operator()<kWideX2>();
    while (column < b.columns) multiply_columns.template operator()<1>();
  }
}

// Loads kLanes steps, from column d on, of the rows of `panel` that one vector of a micro-panel holds, and transposes
// them: each vector of `block` is then one step. Prefetches the same block of `next`. The loop is unrolled, so that
// `block` stays in registers; 16 is the largest number of lanes.
template <class T, class Element>
MAXMOE_INLINE void load_transposed_block(ConstMatrixView<T> panel, ConstMatrixView<T> next, int vector, int64_t d,
                                         Vector<Element> (&block)[kLanes<Element>]) {
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes<Element>; ++lane) {
    const int64_t row = column_of_lane<T>(vector, lane);
    // One line per row: the rows may be pages apart, where hardware prefetchers stop.
    __builtin_prefetch(next.row(row) + d, /*write*/ 0, /*locality: L2*/ 2);
    block[lane] = load_along_depth<Element>(panel.row(row) + d, panel.columns - d);
  }
  transpose_square<Element>(block);
}

// Computes sums[kRows, kLanes] = a * b, or += if `accumulate`, for one vector of columns of a transposed b.
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
    // Unrolled for whole blocks, so that the vectors of `block` stay in registers. Only the last block may be shorter.
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

// The product with a transposed b, whose columns are the rows of `memory`. While NR columns are multiplied, the next NR
// are prefetched. At the end of b, the first columns of the next product are prefetched.
template <class T, class Element, int kRows>
void multiply_few_rows_transposed(FewRows<Element> a, ConstMatrixView<T> memory, MatrixView<Accumulator<T>> sums,
                                  bool accumulate, ConstMatrixView<T> next_memory) {
  using S = Accumulator<T>;
  for (int64_t first = 0; first < memory.rows; first += kNR<S>) {
    const ConstMatrixView<T> panel = memory.row_range(first, memory.rows);
    // Without a next product this is memory past the end of b. A prefetch never faults.
    const bool is_last = first + kNR<S> >= memory.rows && next_memory.rows >= kNR<S>;
    const ConstMatrixView<T> next = is_last ? next_memory : memory.row_range(first + kNR<S>, memory.rows);
#pragma GCC unroll 2
    for (int vector = 0; vector < 2; ++vector) {
      S* const of_vector = sums.data + first + vector * kLanes<S>;
      multiply_few_rows_vector<T, Element, kRows>(a, panel, next, vector, of_vector, sums.row_stride, accumulate);
    }
  }
}

// Calls the kernel whose kRows is the number of rows of `sums`.
template <class T, class Element, int... kIndex>
void multiply_few_rows(FewRows<Element> a, const Product<T>& p, MatrixView<Accumulator<T>> sums, bool accumulate,
                       std::integer_sequence<int, kIndex...> /*indices*/) {
  const ConstMatrixView<T> next = p.next_b.is_quantized() ? ConstMatrixView<T>{} : p.next_b.memory;
  const auto multiply = [&]<int kRows> {
    if (p.b.is_quantized()) {
      multiply_few_rows_quantized<T, Element, kRows>(a, p.b, sums, accumulate);
    } else if (p.b.is_transposed) {
      multiply_few_rows_transposed<T, Element, kRows>(a, p.b.memory, sums, accumulate, next);
    } else {
      multiply_few_rows_row_major<T, Element, kRows>(a, p.b.memory, sums, accumulate, next);
    }
    return true;
  };
  static_cast<void>(((sums.rows == kIndex + 1 && multiply.template operator()<kIndex + 1>()) || ...));
}

// Loads kLanes steps of one row of A, from depth d on.
template <class Element, class T>
MAXMOE_INLINE Vector<Element> load_row_of_a(const GemmOperand<T>& a, int64_t row, int64_t d) {
  constexpr int64_t kDepth = kLanes<Element> * kDepthPerStep<Element>;
  const int64_t depth = a.columns() - d;
  if (!a.is_transposed) return load_along_depth<Element>(a.memory_row(row) + d, depth);
  // The row is a column in memory. Its elements are copied one by one, which takes little time for few rows of A.
  T elements[kDepth];
  for (int64_t i = 0; i < at_most(kDepth, depth); ++i) elements[i] = a.memory_row(d + i)[row];
  return load_along_depth<Element>(elements, depth);
}

// Computes sums = a * b, or += if `accumulate`, for 1 to kMaxFewRows rows. Of `p`, b and next_b are read.
template <class Element, class T>
void add_few_rows(const GemmOperand<T>& a, const Product<T>& p, MatrixView<Accumulator<T>> sums, bool accumulate) {
  constexpr std::make_integer_sequence<int, kMaxFewRows> kIndices;
  const int64_t num_steps = steps_of_depth<Element>(a.columns());
  // A is stored in the slot of packed B, which is free here. One vector is added because whole vectors are stored.
  Element* const rows = scratch<Element>(kPackedBScratch, sums.rows * num_steps + kLanes<Element>);
  for (int64_t r = 0; r < sums.rows; ++r) {
    for (int64_t k = 0; k < num_steps; k += kLanes<Element>) {
      store_vector(rows + r * num_steps + k, load_row_of_a<Element>(a, r, k * kDepthPerStep<Element>));
    }
  }
  multiply_few_rows<T>(FewRows<Element>{rows, num_steps}, p, sums, accumulate, kIndices);
}

// A product with 1 to kMaxFewRows rows. b has no index, a multiple of NR columns, and at least one row.
template <class Element, class T>
void multiply_few_rows(const GemmOperand<T>& a, const Product<T>& p) {
  using S = Accumulator<T>;
  const MatrixView<T>& c = p.c;
  // The sums are not kept in c: rounding them to T after each block of rows of B would change the result.
  const MatrixView<S> sums{scratch<S>(kSumsScratch, c.rows * c.columns), c.rows, c.columns, c.columns};
  for (int64_t r = 0; r < c.rows && p.accumulate; ++r) {
    for (int64_t column = 0; column < c.columns; column += kNR<S>) {
      store_narrowed_x2<S>(sums.row(r) + column, load_x2(c.row(r) + column));
    }
  }
  add_few_rows<Element>(a, p, sums, p.accumulate);
  if (p.has_low_rank_term()) add_few_rows<Element>(GemmOperand<T>(p.reduced), Product<T>{p.expand}, sums, true);
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t column = 0; column < c.columns; column += kNR<S>) {
      const S* of_row = sums.row(r) + column;
      store_narrowed_x2<T>(c.row(r) + column, {load_vector(of_row), load_vector(of_row + kLanes<S>)});
    }
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
