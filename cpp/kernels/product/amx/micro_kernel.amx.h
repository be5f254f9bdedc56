// The micro-kernel on tiles: a micro-tile of C is two tiles of rows, or one, and two tiles of columns.
#pragma once

#include "kernels/product/amx/beside.amx.h"
#include "kernels/product/amx/tiles_of_a.amx.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The tiles: four of C, two of A, two of B.
inline TileConfiguration configuration_for(int64_t rows_of_a) {
  TileConfiguration configuration;
  for (int tile = 0; tile < kNumTiles; ++tile) {
    configuration.row_bytes[tile] = kTileRowBytes;
    configuration.rows[tile] = static_cast<uint8_t>(tile < 6 ? rows_of_a : kMaxTileRows);
  }
  return configuration;
}

constexpr int64_t kSumsStride = kPanelColumns * int64_t{sizeof(float)};

// Computes out = a * b, or sums + a * b: kRowTiles tiles of `height` rows, kPanelColumns floats each, in the order of
// VectorX2. `b` is a packed panel: its even cache lines are the tile of even columns, the odd ones of odd columns.
template <int kRowTiles, Packing kPacking>
void multiply_micro_tile(const PanelOfA& panel_of_a, int64_t height, const BFloat16Pair* b, int64_t num_steps,
                         const float* sums, float* out, Beside& beside) {
  constexpr int64_t kTileColumns = kLanes<float>;
  finish_stores_before_tile_loads();
  if (sums != nullptr) {
    load_tile<0>(sums, kSumsStride);
    load_tile<1>(sums + kTileColumns, kSumsStride);
    if constexpr (kRowTiles == 2) {
      load_tile<2>(sums + height * kPanelColumns, kSumsStride);
      load_tile<3>(sums + height * kPanelColumns + kTileColumns, kSumsStride);
    }
  } else {
    zero_tile<0>();
    zero_tile<1>();
    if constexpr (kRowTiles == 2) {
      zero_tile<2>();
      zero_tile<3>();
    }
  }
  // Copied to registers: a store to the panel could alias `beside`.
  BlockPrefetch lines = beside.lines;
  PanelToPack panel = beside.panel;
  const BFloat16* c = beside.c;
  const int64_t c_stride = beside.c_stride;
  const int64_t units = beside.units_per_tile;
  const int64_t rows_per_step = num_steps == 0 ? 0 : (kRowTiles * height + num_steps - 1) / num_steps;
  const int64_t packed_lines = at_most(units, panel.units()) * PanelToPack::kLinesOfUnit<kPacking>;
  const int64_t packed_lines_per_step = num_steps == 0 ? 0 : (packed_lines + num_steps - 1) / num_steps;
  const BFloat16Pair* target = panel.target();
  const BFloat16* source = panel.row_ahead(0);
  // With few row tiles these lines are loaded soon after, and prefetches would only take the place of other loads.
  const bool prefetches_panel = beside.prefetches_panel;
  const bool reads_ahead = kPacking == Packing::row_major && !panel.has_index() && prefetches_panel;
  const std::byte* a = panel_of_a.data;
  for (int64_t step = 0; step < num_steps; ++step) {
    load_tile<4>(a, panel_of_a.row_bytes);
    load_tile<6>(b, kSumsStride);
    multiply_tiles<0, 4, 6>();
    load_tile<7>(b + kTileColumns, kSumsStride);
    multiply_tiles<1, 4, 7>();
    if constexpr (kRowTiles == 2) {
      load_tile<5>(a + panel_of_a.tile_bytes, panel_of_a.row_bytes);
      multiply_tiles<2, 5, 6>();
      multiply_tiles<3, 5, 7>();
    }
    a += panel_of_a.step_bytes;
    b += kTileDepth / 2 * kPanelColumns;
    if constexpr (kPacking != Packing::row_major) {
      for (int64_t i = at_most(beside.lines_per_step, lines.num_lines()); i > 0; --i) lines.advance();
    }
    // Lines that are written after the steps. They are only prefetched here: a store in flight holds up every tile load
    // that has the same last 12 bits of an address, and a tile load reads 16 lines.
    if (c != nullptr) {
      for (int64_t i = 0; i < rows_per_step; ++i, c += c_stride) __builtin_prefetch(c, 1, 3);
    }
    if (kPacking != Packing::at_once && prefetches_panel) {
      for (int64_t i = 0; i < packed_lines_per_step; ++i, target += 16) __builtin_prefetch(target, 1, 3);
    }
    if (reads_ahead) {
      for (int64_t i = 0; i < packed_lines_per_step; ++i, source += panel.stride()) __builtin_prefetch(source, 0, 3);
    }
  }
  if constexpr (kPacking != Packing::at_once) panel.advance<kPacking>(units, lines);
  beside.lines = lines;
  beside.panel = panel;
  beside.finished.store();
  store_tile<0>(out, kSumsStride);
  store_tile<1>(out + kTileColumns, kSumsStride);
  if constexpr (kRowTiles == 2) {
    store_tile<2>(out + height * kPanelColumns, kSumsStride);
    store_tile<3>(out + height * kPanelColumns + kTileColumns, kSumsStride);
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
