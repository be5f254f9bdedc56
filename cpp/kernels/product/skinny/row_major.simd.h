// The skinny product with a row-major B: skinny_product.simd.h.
#pragma once

#include "kernels/product/skinny/row_groups.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Number of whole cache lines of a row of b that a kernel reads at a time: 0 if it reads half a line.
template <class T, int kVectorsX2>
constexpr int kLinesPerRow =
    static_cast<int>(kVectorsX2 * kLanesX2<Accumulator<T>> * int64_t{sizeof(T)} / kCacheLineBytes);

// Largest number of rows that are multiplied with a row-major b in place. With 16 registers these are up to 24, which
// took up to 1.6 times the time with packed b. An exception is a b of which a kernel reads half a cache line per row
// at a time: if rows are a multiple of 2 KiB apart, the lines share few sets of the first-level cache, and are evicted
// before the other half is read (docs/concepts/kernels.md).
template <class T>
int64_t max_row_major_rows(ConstMatrixView<T> b) {
  const bool reads_lines_twice = kLinesPerRow<T, 1> == 0 && b.row_stride * int64_t{sizeof(T)} % 2048 == 0;
  return kVectorRegisters == 32 || reads_lines_twice ? kMaxRowsInPlace : 2 * kMaxRowsInPlace;
}

// Computes sums = a * b, or += if `accumulate`. At the end of b the first rows of next_b, which may be empty, are
// prefetched.
template <class T, class Element>
void multiply_skinny_row_major(const RowGroups<Element>& a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> sums,
                               bool accumulate, ConstMatrixView<T> next_b);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
