// The skinny product of A with 8-bit quantized values: vnni_product.simd.h.
#include "kernels/product/skinny/vnni_product.simd.h"

#if MAXMOE_DECODES_PAIRS
#include "kernels/product/skinny/multiply_lines.simd.h"
#include "kernels/quantized/scaled_bytes.simd.h"
#endif

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

#if MAXMOE_DECODES_PAIRS
int64_t multiply_vnni_of_8_bits(const VnniProduct& p, int64_t column) {
  const auto columns = vectors_at<2>(p, column);
  if (all_fit(columns, [&](const CodeColumns& c) { return ScaledE4M3Table::fits(c, columns.of[0]); })) {
    return multiply_columns<ScaledE4M3Table, kMaxVnniRows>(p, columns, column);
  }
  if (all_fit(columns, ScaledE4M3::fits)) return multiply_columns<ScaledE4M3, kMaxVnniRows>(p, columns, column);
  if (all_fit(columns, ScaledInt8::fits)) return multiply_columns<ScaledInt8, kMaxVnniRows>(p, columns, column);
  return 0;
}
#endif

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
