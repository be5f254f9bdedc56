// What a micro-kernel does beside its products, which another unit of the processor computes: prefetch B, pack the next
// panel of B, and round and store the micro-tile before.
#pragma once

#include <array>

#include "kernels/isa/tiles.amx.h"
#include "kernels/product/tiled/block_prefetch.simd.h"
#include "kernels/product/tiled/pack.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

constexpr int64_t kPanelColumns = 32;  // of B and C: two tiles

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
    const __m512i row =
        _mm512_permutexvar_epi16(_mm512_load_si512(kOrder.data()), std::bit_cast<__m512i>(halves));
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

// A panel of B that is packed unit by unit. A unit is a step of a row-major B, two rows of 32 columns; or 16 steps of
// the even or of the odd columns of a transposed one.
struct PanelToPack {
  const BFloat16* memory = nullptr;  // what the next unit reads
  int64_t stride = 0;                // of rows in memory
  BFloat16Pair* target = nullptr;
  int64_t units = 0;  // that are left
  bool is_odd = false;

  template <Packing kPacking>
  MAXMOE_INLINE void advance(int64_t count) {
    const int64_t n = at_most(count, units);
    units -= n;
    if constexpr (kPacking == Packing::row_major) {
      for (int64_t i = 0; i < n; ++i, memory += 2 * stride, target += kPanelColumns) {
        const StepX2<BFloat16Pair> step = load_step<BFloat16Pair>(memory, memory + stride);
        store_vector(target, step.first);
        store_vector(target + kLanes<BFloat16Pair>, step.second);
      }
    } else if constexpr (kPacking == Packing::transposed) {
      for (int64_t i = 0; i < n; ++i) pack_transposed_unit();
    }
  }

  // Cache lines that a unit writes, and for a row-major B reads.
  template <Packing kPacking>
  static constexpr int64_t kLinesOfUnit = kPacking == Packing::row_major ? 2 : 16;

 private:
  MAXMOE_INLINE void pack_transposed_unit() {
    Vector<BFloat16Pair> block[16];
#pragma GCC unroll 16
    for (int lane = 0; lane < 16; ++lane) block[lane] = load_along_depth<BFloat16Pair>(memory + 2 * lane * stride);
    transpose_square<BFloat16Pair>(block);
#pragma GCC unroll 16
    for (int step = 0; step < 16; ++step) store_vector<BFloat16Pair>(target + step * kPanelColumns, block[step]);
    is_odd = !is_odd;
    memory += is_odd ? stride : 2 * kLanes<BFloat16Pair> - stride;
    target += is_odd ? kLanes<BFloat16Pair> : 16 * kPanelColumns - kLanes<BFloat16Pair>;
  }
};

struct Beside {
  BlockPrefetch lines;
  int64_t lines_per_step = 0;
  PanelToPack panel;
  int64_t units_per_tile = 0;
  FinishedTile finished;
  const BFloat16* c = nullptr;  // the rows that the micro-kernel computes, prefetched for writing; null if not
  int64_t c_stride = 0;
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
