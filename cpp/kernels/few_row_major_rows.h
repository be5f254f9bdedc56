// The product of few rows of A with a row-major B: few_rows.h. Only for the .cpp files that are compiled per
// instruction set.
#pragma once

#include "row_groups.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Largest number of rows that are multiplied with a row-major b in place. With 16 registers packed blocks of B are
// narrow, and 13 to 24 rows took up to 1.6 times the time with them. Not where kernels read half a cache line of each
// row, and lines of a multiple of 2 KiB apart share so few sets of the first-level cache that they are read twice
// (docs/concepts/kernels.md).
template <class T>
int64_t max_row_major_rows(ConstMatrixView<T> b) {
  constexpr bool kReadsHalfLines = kLanesX2<Accumulator<T>> * sizeof(T) < kCacheLineBytes;
  const bool reads_lines_twice = kReadsHalfLines && b.row_stride * int64_t{sizeof(T)} % 2048 == 0;
  return kVectorRegisters == 32 || reads_lines_twice ? kMaxRowsInPlace : 2 * kMaxRowsInPlace;
}

// Computes sums = a * b, or += if `accumulate`. At the end of b the first rows of next_b, which may be empty, are
// prefetched.
template <class T, class Element>
void multiply_few_rows_row_major(const RowGroups<Element>& a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> sums,
                                 bool accumulate, ConstMatrixView<T> next_b);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
