// What a micro-kernel does beside its products, which another unit of the processor computes: prefetch B, pack the next
// panel of B, and round and store the micro-tile before.
#pragma once

#include <array>

#include "kernels/isa/tiles.amx.h"
#include "kernels/product/tiled/block_prefetch.simd.h"
#include "kernels/product/tiled/pack.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

constexpr int64_t kPanelColumns = 32;  // of B and C: two tiles

// Sets the sums of kPanelColumns columns of a row to the first `columns` numbers of c, and to zeros after them.
MAXMOE_INLINE void load_sums(const BFloat16* c, int64_t columns, float* sums) {
  BFloat16 padded[kPanelColumns];
  if (columns < kPanelColumns) {
    zero_row(padded, kPanelColumns);
    copy_row(c, padded, columns);
    c = padded;
  }
  store_narrowed_x2<float>(sums, load_x2(c));
}

// The sums of a micro-tile of C that are still to be rounded and stored. A row is kPanelColumns sums, in the order of
// VectorX2.
struct FinishedTile {
  const float* sums = nullptr;
  BFloat16* c = nullptr;
  int64_t c_stride = 0;
  int64_t rows = 0;
  int64_t columns = 0;
  bool is_nontemporal = false;

  MAXMOE_INLINE void store() {
    if (columns < kPanelColumns) {
      for (int64_t r = 0; r < rows; ++r) {
        BFloat16 row[kPanelColumns];
        store_row<false>(sums + r * kPanelColumns, row);
        copy_row(row, c + r * c_stride, columns);
      }
    } else if (is_nontemporal) {
      for (int64_t r = 0; r < rows; ++r) store_row<true>(sums + r * kPanelColumns, c + r * c_stride);
    } else {
      for (int64_t r = 0; r < rows; ++r) store_row<false>(sums + r * kPanelColumns, c + r * c_stride);
    }
    rows = 0;
  }

 private:
  // The instruction that rounds takes subnormal sums as zeros. Products of tiles return none.
  template <bool kNonTemporal>
  static MAXMOE_INLINE void store_row(const float* of_row, BFloat16* target) {
    const VectorX2<float> x2{load_vector(of_row), load_vector(of_row + kLanes<float>)};
#if defined(__AVX512BF16__)
    alignas(64) static constexpr auto kOrder = [] {
      std::array<uint16_t, kPanelColumns> order{};
      for (uint16_t i = 0; i < kPanelColumns; ++i) order[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
      return order;
    }();
    const __m512bh halves = _mm512_cvtne2ps_pbh(x2.second, x2.first);
    const __m512i row = _mm512_permutexvar_epi16(_mm512_load_si512(kOrder.data()), std::bit_cast<__m512i>(halves));
    if constexpr (kNonTemporal) {
      _mm512_stream_si512(reinterpret_cast<__m512i*>(target), row);
    } else {
      _mm512_storeu_si512(target, row);
    }
#else
    store_narrowed_x2<BFloat16, kNonTemporal>(target, x2);
#endif
  }
};

// How a panel of B is packed: at once, or in units beside the products of the panel before.
enum class Packing { at_once, row_major, transposed };

// A panel of B that is packed unit by unit. A unit is a step of a row-major B, two rows of 32 columns, which an index
// may select; or 16 steps of the even or of the odd columns of a transposed one.
class PanelToPack {
 public:
  PanelToPack() = default;
  // A row-major panel. The last steps, with fewer than two rows, are packed at once.
  PanelToPack(const GemmOperand<BFloat16>& b, Range depth, int64_t column, int64_t padded_depth, BFloat16Pair* target)
      : memory_(b.memory.data + column),
        stride_(b.memory.row_stride),
        index_(b.index),
        divisor_(b.divisor),
        depth_(depth.begin),
        target_(target),
        units_(depth.size() / 2) {
    BFloat16Pair* tail = target + units_ * kPanelColumns;
    if (depth.size() % 2 == 1) {
      store_step(load_step<BFloat16Pair>(row(depth.end - 1), static_cast<const BFloat16*>(nullptr)), tail);
      tail += kPanelColumns;
    }
    zero_row(tail, target + padded_depth / 2 * kPanelColumns - tail);
  }
  // A transposed panel, whose depth is whole tiles.
  PanelToPack(ConstMatrixView<BFloat16> columns, BFloat16Pair* target)
      : memory_(columns.data), stride_(columns.row_stride), target_(target), units_(columns.columns / 16) {}

  int64_t units() const { return units_; }  // that are left

  // Packs `count` units. A row-major panel prefetches a line for each line that it reads: in bursts, prefetches would
  // take the place of other loads.
  template <Packing kPacking>
  MAXMOE_INLINE void advance(int64_t count, BlockPrefetch& lines) {
    const int64_t n = at_most(count, units_);
    units_ -= n;
    if constexpr (kPacking == Packing::row_major) {
      for (int64_t i = 0; i < n; ++i, depth_ += 2, target_ += kPanelColumns) {
        if (lines.num_lines() > 0) lines.advance();
        if (lines.num_lines() > 0) lines.advance();
        store_step(load_step<BFloat16Pair>(row(depth_), row(depth_ + 1)), target_);
      }
    } else if constexpr (kPacking == Packing::transposed) {
      for (int64_t i = 0; i < n; ++i) pack_transposed_unit();
    }
  }

  // The cache lines that a unit writes.
  static constexpr int64_t lines_of_unit(Packing packing) { return packing == Packing::row_major ? 2 : 16; }
  MAXMOE_INLINE const BFloat16Pair* target() const { return target_; }
  // The next row; only without an index.
  MAXMOE_INLINE const BFloat16* row() const { return memory_ + depth_ * stride_; }
  MAXMOE_INLINE bool has_index() const { return index_ != nullptr; }
  MAXMOE_INLINE int64_t stride() const { return stride_; }

 private:
  static constexpr int64_t kPairs = kLanes<BFloat16Pair>;

  MAXMOE_INLINE const BFloat16* row(int64_t d) const {
    return memory_ + (index_ == nullptr ? d : index_[d] / divisor_) * stride_;
  }
  static MAXMOE_INLINE void store_step(const StepX2<BFloat16Pair>& step, BFloat16Pair* target) {
    store_vector(target, step.first);
    store_vector(target + kPairs, step.second);
  }
  MAXMOE_INLINE void pack_transposed_unit() {
    Vector<BFloat16Pair> block[16];
#pragma GCC unroll 16
    for (int64_t lane = 0; lane < 16; ++lane)
      block[lane] = load_along_depth<BFloat16Pair>(memory_ + 2 * lane * stride_);
    transpose_square<BFloat16Pair>(block);
#pragma GCC unroll 16
    for (int64_t step = 0; step < 16; ++step) store_vector<BFloat16Pair>(target_ + step * kPanelColumns, block[step]);
    is_odd_ = !is_odd_;
    memory_ += is_odd_ ? stride_ : 2 * kPairs - stride_;
    target_ += is_odd_ ? kPairs : 16 * kPanelColumns - kPairs;
  }

  const BFloat16* memory_ = nullptr;
  int64_t stride_ = 0;  // of rows in memory
  const int64_t* index_ = nullptr;
  int64_t divisor_ = 1;
  int64_t depth_ = 0;  // of a row-major panel: the next row
  BFloat16Pair* target_ = nullptr;
  int64_t units_ = 0;
  bool is_odd_ = false;
};

struct Beside {
  BlockPrefetch lines;
  int64_t lines_per_step = 0;
  PanelToPack panel;
  int64_t units_per_tile = 0;
  bool prefetches_panel = false;  // the lines that its units read and write, during the steps
  FinishedTile finished;
  const BFloat16* c = nullptr;  // the rows that the micro-kernel computes, prefetched for writing; null if not
  int64_t c_stride = 0;
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
