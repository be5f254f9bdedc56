// The skinny product with quantized values that run along the inner dimension, decoded to pairs of bfloat16. With all
// decoders and numbers of rows it takes long to compile, hence a separate file.
#pragma once

#include "kernels/product/skinny/row_groups.simd.h"
#include "kernels/quantized/quantized_matrix.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Largest number of rows for which pairs are multiplied as they are decoded, without being stored: 2 accumulators per
// row, the quantized values and the scales fit into the registers.
constexpr int kMaxVnniRows = 8;

using VnniProduct = ProductInPlace<BFloat16Pair>;

// Computes the sums of some columns from `column` on, a multiple of NR. Returns their number, 0 if no decoder has the
// bits of the definition.
int64_t multiply_vnni(const VnniProduct& p, int64_t column);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
