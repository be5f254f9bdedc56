// The micro-kernels that pack quantized values, decoded meanwhile.
#include "kernels/product/tiled/pack_quantized.simd.h"
#include "kernels/product/tiled/pack_vnni.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

#if MAXMOE_DECODES_PAIRS
bool micro_kernel_packs_codes(const GemmOperand<BFloat16>& b) {
  return b.is_transposed || packs_pairs(b);
}

template <class Out>
void micro_kernel_packing_codes(const MicroTile<Out, BFloat16Pair>& tile, const GemmOperand<BFloat16>& b, Range depth,
                                int64_t column, BFloat16Pair* panel) {
  const QuantizedMatrix& m = b.quantized;
  const bool is_done = b.is_transposed ? micro_kernel_packing_columns(tile, m, depth, column, panel)
                                       : micro_kernel_packing_rows(tile, m, depth, column, panel);
  if (is_done) return count_packed(depth.size() * kNR<float>);
  pack_decoded_b(b, depth, {column, column + kNR<float>}, panel);
  multiply_packed<kMR>(tile, panel);
}

template void micro_kernel_packing_codes(const MicroTile<float, BFloat16Pair>&, const GemmOperand<BFloat16>&, Range,
                                         int64_t, BFloat16Pair*);
template void micro_kernel_packing_codes(const MicroTile<BFloat16, BFloat16Pair>&, const GemmOperand<BFloat16>&, Range,
                                         int64_t, BFloat16Pair*);
#endif

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
