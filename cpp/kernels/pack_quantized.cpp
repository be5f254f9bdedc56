// Packing of a quantized B: its codes are decoded while a micro-panel is packed. Both orientations read the same codes.
#include "pack_quantized.h"

#include "blocking.h"
#include "decode_rows.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Depth that is decoded at a time: with 64 columns of float 32 KiB.
constexpr int64_t kDecodedDepth = 128;

// pack_b for any codes: parts of B are decoded, and packed from there.
template <class Element, class T>
void pack_decoded_b(const GemmOperand<T>& b, Range depth, Range columns, Element* panels) {
  constexpr int kWidth = kNR<Accumulator<T>>;
  const int64_t panel_size = steps_of_depth<Element>(depth.size()) * kWidth;
  for (int64_t d = depth.begin; d < depth.end; d += kDecodedDepth) {
    const Range part = range_from(d, kDecodedDepth, depth.end);
    const GemmOperand<T> decoded = decoded_block(b, part, columns);
    Element* target = panels + (d - depth.begin) / kDepthPerStep<Element> * kWidth;
    for (int64_t column = 0; column < columns.size(); column += kWidth, target += panel_size) {
      pack_b(decoded, {0, part.size()}, range_from(column, kWidth, columns.size()), target);
    }
  }
}

}  // namespace

// pack_b for a quantized b. `columns` begins at a multiple of kMinColumnsPerScale or of the width of a panel.
template <class Element, class T>
void pack_quantized_b(const GemmOperand<T>& b, Range depth, Range columns, Element* panels) {
#if defined(MAXMOE_DECODES_PAIRS)
  if constexpr (std::is_same_v<Element, BFloat16Pair>) {
    constexpr int kWidth = kNR<Accumulator<T>>;
    if (packs_pairs(b) && columns.size() % kWidth == 0) {
      count_packed(depth.size() * columns.size());
      return pack_pairs_row_major(b.quantized, depth, columns, panels);
    }
    if (b.is_transposed) {
      const int64_t panel_size = steps_of_depth<Element>(depth.size()) * kWidth;
      for (int64_t column = columns.begin; column < columns.end; column += kWidth, panels += panel_size) {
        if (pack_pairs_along_depth(b.quantized, {column, columns.end}, depth, panels)) {
          count_packed(depth.size() * at_most(kWidth, columns.end - column));
        } else {
          pack_decoded_b(b, depth, range_from(column, kWidth, columns.end), panels);
        }
      }
      return;
    }
  }
#endif
  pack_decoded_b(b, depth, columns, panels);
}

#define MAXMOE_INSTANTIATE_FOR(T) template void pack_quantized_b(const GemmOperand<T>&, Range, Range, ElementOf<T>*);

MAXMOE_FOR_EACH_TYPE(MAXMOE_INSTANTIATE_FOR)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
