// The blocks of tile_gemm: their sizes, their positions in B, and the packed blocks of A.
#pragma once

#include "kernels/executor.h"
#include "kernels/isa/caches.h"
#include "kernels/product/gemm.h"
#include "kernels/product/tiled/block_prefetch.simd.h"
#include "kernels/product/tiled/pack.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

template <class T>
using ElementOf = std::conditional_t<kMultipliesPairs && std::is_same_v<T, BFloat16>, BFloat16Pair, Accumulator<T>>;

// KC in steps of the micro-kernel. A micro-panel of A takes 24 KiB with AVX-512 and 12 KiB with AVX2, at most three
// quarters of a first-level cache.
constexpr int64_t kKCSteps = 512;

// NC, the number of columns of a block of B. It follows from the size of the second-level cache, which is read once.
template <class S>
int64_t block_columns() {
  constexpr int64_t kPanelBytes = kKCSteps * kNR<S> * int64_t{sizeof(S)};
  static const int64_t columns = panels_per_block(kPanelBytes, second_level_cache_bytes()) * kNR<S>;
  return columns;
}

// Rows and columns of an outer block of B. Every row of a row-major B may be on another page, so that the number of
// rows is limited by the entries of a second-level TLB. Half the rows gave 0.94 of the speed at D 4096, and the same
// speed at larger D (docs/concepts/kernels.md).
constexpr int64_t kOuterDepth = 4096;
constexpr int64_t kOuterColumns = 2048;

// The micro-panels of A, block by block of the inner dimension. A block is packed when it is first needed, and kept for
// the other columns and for the other products of the same rows.
template <class T>
class PackedA {
 public:
  using Element = ElementOf<T>;
  static constexpr int64_t kKC = kKCSteps * kDepthPerStep<Element>;

  PackedA(const GemmOperand<T>& a, int scratch_slot)
      : a_(a),
        block_size_((a.rows() + kMR - 1) / kMR *
                    panel_size_of_a<Element>(steps_of_depth<Element>(at_most(a.columns(), kKC)))),
        blocks_(scratch<Element>(scratch_slot, (a.columns() + kKC - 1) / kKC * block_size_)) {}

  const Element* block(Range depth) {
    Element* const panels = blocks_ + depth.begin / kKC * block_size_;
    // Blocks are requested in ascending order at first, so that one number tells which of them are packed.
    if (depth.end > packed_depth_) pack_a(a_, depth, panels);
    packed_depth_ = depth.end > packed_depth_ ? depth.end : packed_depth_;
    return panels;
  }

 private:
  GemmOperand<T> a_;
  int64_t block_size_;
  Element* blocks_;
  int64_t packed_depth_ = 0;
};

// Position of a block, or of an outer block, in B.
struct BlockOfB {
  Range depth;
  Range columns;
};

// The outer block that holds an element of b.
template <class T>
BlockOfB outer_block(const GemmOperand<T>& b, int64_t depth, int64_t column) {
  return {range_from(depth / kOuterDepth * kOuterDepth, kOuterDepth, b.rows()),
          range_from(column / kOuterColumns * kOuterColumns, kOuterColumns, b.columns())};
}

// The block that begins at (depth, column) in an outer block.
template <class T>
BlockOfB block_at(const BlockOfB& outer, int64_t depth, int64_t column) {
  return {range_from(depth, PackedA<T>::kKC, outer.depth.end),
          range_from(column, block_columns<Accumulator<T>>(), outer.columns.end)};
}

// Prefetch of the block of B that follows in the order of the loops. After the last block it is the first one of the
// next product.
template <class T>
BlockPrefetch next_block(const Product<T>& p, const BlockOfB& outer, const BlockOfB& block) {
  const auto prefetch = [](const GemmOperand<T>& b, int64_t depth, int64_t column) -> BlockPrefetch {
    const BlockOfB next = block_at<T>(outer_block(b, depth, column), depth, column);
    return {b, next.depth, next.columns};
  };
  // In the order pc, jc, po, jo, innermost loop first.
  if (block.depth.end < outer.depth.end) return prefetch(p.b, block.depth.end, block.columns.begin);
  if (block.columns.end < outer.columns.end) return prefetch(p.b, outer.depth.begin, block.columns.end);
  if (outer.depth.end < p.b.rows()) return prefetch(p.b, outer.depth.end, outer.columns.begin);
  if (outer.columns.end < p.b.columns()) return prefetch(p.b, 0, outer.columns.end);
  return prefetch(p.next_b, 0, 0);
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
