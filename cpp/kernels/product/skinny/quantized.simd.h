// The product of few rows of A with a quantized B: skinny_product.simd.h.
#pragma once

#include "kernels/product/gemm.h"
#include "kernels/product/skinny/row_groups.simd.h"
#include "kernels/product/skinny/vnni_product.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Maximum number of rows of A for a quantized B: pairs of more rows are multiplied faster with packed blocks of B.
template <class Element>
constexpr int kMaxFewQuantizedRows = kMaxRowsInPlace;
#if defined(MAXMOE_DECODES_PAIRS)
template <>
inline constexpr int kMaxFewQuantizedRows<BFloat16Pair> = kMaxRowsOfCodes;
#endif

// Computes sums = a * b, or += if `accumulate`. Where codes are multiplied as they are decoded, the first codes of
// next_b, which may be empty, are prefetched at the end of b.
template <class T, class Element>
void multiply_few_rows_quantized(const RowGroups<Element>& a, const GemmOperand<T>& b, const GemmOperand<T>& next_b,
                                 MatrixView<Accumulator<T>> sums, bool accumulate);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
