// Packing of a quantized B.
#pragma once

#include "kernels/product/tiled/pack.simd.h"
#include "kernels/product/tiled/pack_transposed.simd.h"
#include "kernels/quantized/columns.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Whether quantized values are decoded while they are packed. If not, tile_gemm decodes whole blocks before it packs
// them.
#if MAXMOE_DECODES_PAIRS
template <class Element>
constexpr bool kDecodesPairs = std::is_same_v<Element, BFloat16Pair>;

// pack_b for quantized values. `columns` begins at a multiple of kMinColumnsPerScale.
void pack_codes(const GemmOperand<BFloat16>& b, Range depth, Range columns, BFloat16Pair* panels);

// pack_codes for quantized values that fit no decoder of pairs: parts of B are decoded, and packed from there.
void pack_decoded_b(const GemmOperand<BFloat16>& b, Range depth, Range columns, BFloat16Pair* panels);

// Whether micro-kernels pack quantized values: always along the inner dimension, across it if a decoder fits.
bool micro_kernel_packs_codes(const GemmOperand<BFloat16>& b);

// micro_kernel_packing_b for quantized values. Out is float or BFloat16.
template <class Out>
void micro_kernel_packing_codes(const MicroTile<Out, BFloat16Pair>& tile, const GemmOperand<BFloat16>& b, Range depth,
                                int64_t column, BFloat16Pair* panel);
#else
template <class Element>
constexpr bool kDecodesPairs = false;
#endif

// pack_b for any B that is not quantized, or whose quantized values are decoded while they are packed.
template <class Element, class T>
void pack_columns_of_b(const GemmOperand<T>& b, Range depth, Range columns, Element* panels) {
#if MAXMOE_DECODES_PAIRS
  if constexpr (kDecodesPairs<Element>) {
    if (b.is_quantized()) return pack_codes(b, depth, columns, panels);
  }
#endif
  pack_b(b, depth, columns, panels);
}

// Returns b with has_ordinary_scales set, if the packing of its quantized values depends on it.
template <class Element, class T>
GemmOperand<T> with_scales_read(GemmOperand<T> b) {
#if MAXMOE_DECODES_PAIRS
  if constexpr (kDecodesPairs<Element>) {
    if (b.is_quantized() && !b.is_transposed) b.quantized.has_ordinary_scales = have_ordinary_scales(b.quantized);
  }
#endif
  return b;
}

// Whether the first row of micro-tiles packs a block of B: a row-major one, a transposed one without an index with
// AVX-512, or a quantized one for which micro_kernel_packs_codes is true.
template <class Element, class T>
bool micro_kernel_packs(const GemmOperand<T>& b) {
  if (!b.is_quantized()) return !b.is_transposed || (kTransposesMeanwhile && b.index == nullptr);
#if MAXMOE_DECODES_PAIRS
  if constexpr (kDecodesPairs<Element>) return micro_kernel_packs_codes(b);
#endif
  return false;
}

// The micro-kernel that packs the NR columns of B from `column` on, for any B for which micro_kernel_packs is true.
template <class Out, class Element, class T>
MAXMOE_INLINE void micro_kernel_packing(const MicroTile<Out, Element>& tile, const GemmOperand<T>& b, Range depth,
                                        int64_t column, Element* panel) {
#if MAXMOE_DECODES_PAIRS
  if constexpr (kDecodesPairs<Element>) {
    if (b.is_quantized()) return micro_kernel_packing_codes(tile, b, depth, column, panel);
  }
#endif
  if constexpr (kTransposesMeanwhile) {
    if (b.is_transposed) return micro_kernel_packing_transposed_b(tile, b, depth, column, panel);
  }
  micro_kernel_packing_b(tile, b, depth, column, panel);
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
