// The product of few rows of A with a row-major B: few_rows.h. Only for the .cpp files that are compiled per
// instruction set.
//
// The loops over columns and over the inner dimension are exchanged. The outer loop runs over blocks of rows of B, the
// inner one over all columns. While a block is multiplied, the next one is prefetched in the order of memory, which
// hardware prefetchers follow and which has the fewest TLB misses. The partial sums of C are loaded and stored once per
// block. C has few rows, so that its sums stay in the first- or second-level cache.
#pragma once

#include "few_quantized_rows.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Size of a block of rows of a row-major B, in bytes and in rows. While a block is multiplied, the next one is
// prefetched into the second-level cache, in the order of memory: into the first-level cache it took up to 1.6 times
// the time, and larger blocks took up to 1.1 times (docs/performance.md).
constexpr int64_t kFewRowsBlockBytes = int64_t{32} * 1024;
constexpr int64_t kFewRowsMinDepth = 8;
constexpr int64_t kFewRowsMaxDepth = 64;

// Number of rows of a block: an even one, so that only the last block of B can end within a pair.
MAXMOE_INLINE int64_t rows_of_few_rows_block(int64_t row_bytes) {
  const int64_t rows = kFewRowsBlockBytes / row_bytes / 2 * 2;
  return rows < kFewRowsMinDepth ? kFewRowsMinDepth : at_most(rows, kFewRowsMaxDepth);
}

// Addresses that are prefetched while the columns of a block are multiplied: kLines cache lines for each row.
struct RowPrefetch {
  const std::byte* address;
  int64_t row_bytes;  // from one row to the next

  template <int kLines>
  MAXMOE_INLINE void advance() {
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(address + i * kCacheLineBytes, /*write*/ 0, /*locality: L2*/ 2);
    address += row_bytes;
  }
};

// The number of cache lines of a row that a kernel reads at a time; where it reads half a line, it prefetches it twice.
template <class T, int kVectorsX2>
constexpr int kLinesPerRow = kVectorsX2 * kNR<Accumulator<T>> * static_cast<int>(sizeof(T)) / kCacheLineBytes;

// Computes sums[kRows, kVectorsX2 * NR] = a * b, or += if `accumulate`, for one block of rows of B. The columns of the
// sums are in the order of VectorX2.
//
// The loops over `sum` are unrolled completely: 12 is the largest kRows, 8 the largest number of vectors. The compiler
// keeps an array in registers only if all of its indices are constants.
template <class T, class Element, int kRows, int kVectorsX2>
MAXMOE_INLINE void multiply_few_rows_block(FewRows<Element, kRows> a, ConstMatrixView<T> b, Range depth,
                                           Accumulator<T>* sums, int64_t sums_stride, bool accumulate,
                                           RowPrefetch next) {
  using S = Accumulator<T>;
  constexpr int kDepthOfStep = kDepthPerStep<Element>;
  constexpr int kLines = kLinesPerRow<T, kVectorsX2> == 0 ? 1 : kLinesPerRow<T, kVectorsX2>;
  Vector<S> sum[kRows][2 * kVectorsX2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectorsX2; ++v) {
      sum[r][v] = accumulate ? load_vector(sums + r * sums_stride + v * kLanes<S>) : Vector<S>{};
    }
  }
  const auto multiply_step = [&](int64_t d, const T* row, const T* second) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsX2; ++v) {
      const StepX2<Element> step =
          load_step<Element>(row + v * kNR<S>, second == nullptr ? nullptr : second + v * kNR<S>);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const Element factor = a(r, d / kDepthOfStep);
        sum[r][2 * v] = multiply_add(sum[r][2 * v], factor, step.first);
        sum[r][2 * v + 1] = multiply_add(sum[r][2 * v + 1], factor, step.second);
      }
    }
  };
  int64_t d = depth.begin;
  const T* row = b.row(d);
  for (; d + kDepthOfStep <= depth.end; d += kDepthOfStep, row += kDepthOfStep * b.row_stride) {
#pragma GCC unroll 2
    for (int i = 0; i < kDepthOfStep; ++i) next.advance<kLines>();
    multiply_step(d, row, row + b.row_stride);
  }
  // A missing second row of a step of pairs counts as zeros.
  if (d < depth.end) multiply_step(d, row, nullptr);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < 2 * kVectorsX2; ++v) store_vector<S>(sums + r * sums_stride + v * kLanes<S>, sum[r][v]);
  }
}

// The product with a row-major b. While a block of rows of b is multiplied, the next block is prefetched in the order
// of memory. At the end of b, the rows of the next product are prefetched.
template <class T, class Element, int kRows>
void multiply_few_rows_row_major(FewRows<Element, kRows> a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> sums,
                                 bool accumulate, ConstMatrixView<T> next_b) {
  constexpr int kWideX2 = few_rows_vectors_x2(kRows);
  constexpr int64_t kWideColumns = kWideX2 * kNR<Accumulator<T>>;
  const int64_t rows_per_block = rows_of_few_rows_block(b.columns * int64_t{sizeof(T)});
  for (int64_t d = 0; d < b.rows; d += rows_per_block) {
    const Range depth = range_from(d, rows_per_block, b.rows);
    // Past the last row of b, the rows of the next product are prefetched; without one, those at hand once more.
    const ConstMatrixView<T> after_b = next_b.rows > 0 ? next_b : b.row_range(d, b.rows);
    const ConstMatrixView<T> next = depth.end < b.rows ? b.row_range(depth.end, b.rows) : after_b;
    const bool is_contiguous = next.row_stride == next.columns;
    int64_t column = 0;
    const auto multiply_columns = [&]<int kVectorsX2> {
      constexpr int64_t kColumns = kVectorsX2 * kNR<Accumulator<T>>;
      const RowPrefetch of_columns{
          reinterpret_cast<const std::byte*>(next.data + (is_contiguous ? column * depth.size() : column)),
          (is_contiguous ? kColumns : next.row_stride) * int64_t{sizeof(T)}};
      multiply_few_rows_block<T, Element, kRows, kVectorsX2>(a, b.column_range(column, column + kColumns), depth,
                                                             sums.data + column, sums.row_stride, accumulate || d > 0,
                                                             of_columns);
      column += kColumns;
    };
    // The loop over columns is inside, so that b is read row block by row block: see the top of the file.
    while (column + kWideColumns <= b.columns) multiply_columns.template operator()<kWideX2>();
    while (column < b.columns) multiply_columns.template operator()<1>();
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
