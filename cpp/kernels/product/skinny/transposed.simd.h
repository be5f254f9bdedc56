// The skinny product with a transposed B: skinny_product.simd.h.
#pragma once

#include "kernels/product/skinny/row_groups.simd.h"
#include "kernels/product/tiled/pack.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Largest number of rows whose accumulators fit into 16 registers beside pairs that are multiplied as floats.
constexpr int kMaxRowsOfPairs = 5;

// The largest number of rows of a group that is multiplied with a transposed b.
template <class T, class Element>
constexpr int64_t max_transposed_group(int64_t num_rows) {
  return num_rows <= kMaxRowsOfGroup || std::is_same_v<Element, BlockElement<T, Element>> ? kMaxRowsOfGroup
                                                                                          : kMaxRowsOfPairs;
}

// Computes sums = a * b, or += if `accumulate`, where the columns of b are the rows of `memory`. At the end of b the
// first columns of the next product, which may be empty, are prefetched.
template <class T, class Element>
void multiply_skinny_transposed(const RowGroups<Element>& a, ConstMatrixView<T> memory, MatrixView<Accumulator<T>> sums,
                                bool accumulate, ConstMatrixView<T> next_memory);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
