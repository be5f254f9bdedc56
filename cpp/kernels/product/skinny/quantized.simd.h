// The skinny product with a quantized B: skinny_product.simd.h.
#pragma once

#include "kernels/product/gemm.h"
#include "kernels/product/skinny/row_groups.simd.h"
#include "kernels/product/skinny/vnni.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Maximum number of rows of A for a quantized B: pairs of more rows are multiplied faster with packed blocks of B.
template <class Element>
constexpr int kMaxQuantizedRows = kMaxRowsInPlace;
#if MAXMOE_DECODES_PAIRS
template <>
inline constexpr int kMaxQuantizedRows<BFloat16Pair> = kMaxVnniRows;
#endif

// Computes sums = a * b, or += if `accumulate`. Where quantized values are multiplied as they are decoded, the first
// quantized values of next_b, which may be empty, are prefetched at the end of b.
template <class T, class Element>
void multiply_skinny_quantized(const RowGroups<Element>& a, const GemmOperand<T>& b, const GemmOperand<T>& next_b,
                               MatrixView<Accumulator<T>> sums, bool accumulate);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
