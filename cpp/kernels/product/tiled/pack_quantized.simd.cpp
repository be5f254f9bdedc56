// Packing of quantized values that are decoded meanwhile. Both orientations read the same bytes.
#include "kernels/product/tiled/pack_quantized.simd.h"

#include "kernels/product/tiled/blocking.simd.h"
#include "kernels/product/tiled/pack_vnni.simd.h"
#include "kernels/quantized/decode_rows.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

#if MAXMOE_DECODES_PAIRS
namespace {

constexpr int64_t kWidth = kNR<float>;

// Depth that is decoded at a time, for quantized values that fit no decoder of pairs: with 64 columns 16 KiB.
constexpr int64_t kDecodedDepth = 128;

}  // namespace

void pack_decoded_b(const GemmOperand<BFloat16>& b, Range depth, Range columns, BFloat16Pair* panels) {
  const int64_t panel_size = steps_of_depth<BFloat16Pair>(depth.size()) * kWidth;
  for (int64_t d = depth.begin; d < depth.end; d += kDecodedDepth) {
    const Range part = range_from(d, kDecodedDepth, depth.end);
    const GemmOperand<BFloat16> decoded = decoded_block(b, part, columns);
    BFloat16Pair* target = panels + (d - depth.begin) / kDepthPerStep<BFloat16Pair> * kWidth;
    for (int64_t column = 0; column < columns.size(); column += kWidth, target += panel_size) {
      pack_b(decoded, {0, part.size()}, range_from(column, kWidth, columns.size()), target);
    }
  }
}

void pack_codes(const GemmOperand<BFloat16>& b, Range depth, Range columns, BFloat16Pair* panels) {
  if (packs_pairs(b) && columns.size() % kWidth == 0) {
    count_packed(depth.size() * columns.size());
    return pack_pairs_row_major(b.quantized, depth, columns, panels);
  }
  if (!b.is_transposed) return pack_decoded_b(b, depth, columns, panels);
  const int64_t panel_size = steps_of_depth<BFloat16Pair>(depth.size()) * kWidth;
  for (int64_t column = columns.begin; column < columns.end; column += kWidth, panels += panel_size) {
    if (pack_pairs_along_depth(b.quantized, {column, columns.end}, depth, panels)) {
      count_packed(depth.size() * at_most(kWidth, columns.end - column));
    } else {
      pack_decoded_b(b, depth, range_from(column, kWidth, columns.end), panels);
    }
  }
}
#endif

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
