// The product of few rows of A with a row-major B: few_rows.h. Only for the .cpp files that are compiled per
// instruction set.
#pragma once

#include "row_groups.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Computes sums = a * b, or += if `accumulate`. At the end of b the first rows of next_b, which may be empty, are
// prefetched.
template <class T, class Element>
void multiply_few_rows_row_major(const RowGroups<Element>& a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> sums,
                                 bool accumulate, ConstMatrixView<T> next_b);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
