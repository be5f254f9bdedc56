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

constexpr int64_t kTileColumns = kTileRowBytes / int64_t{sizeof(float)};
constexpr int64_t kSumsStride = kPanelColumns * int64_t{sizeof(float)};

// Calls body<kTile>(place) for the tiles of C, where `place` is the first element of a tile in the sums of a
// micro-tile.
template <int kRowTiles, class Body>
MAXMOE_INLINE void for_tiles_of_c(int64_t height, const Body& body) {
  body.template operator()<0>(int64_t{0});
  body.template operator()<1>(kTileColumns);
  if constexpr (kRowTiles == 2) {
    body.template operator()<2>(height * kPanelColumns);
    body.template operator()<3>(height * kPanelColumns + kTileColumns);
  }
}

// The tiles of C begin with `sums`, or with zeros if it is null.
template <int kRowTiles>
MAXMOE_INLINE void begin_sums(const float* sums, int64_t height) {
  for_tiles_of_c<kRowTiles>(height, [&]<int kTile>(int64_t place) MAXMOE_INLINE_LAMBDA {
    if (sums == nullptr) {
      zero_tile<kTile>();
    } else {
      load_tile<kTile>(sums + place, kSumsStride);
    }
  });
}

// Adds the products of one step. `b` is the step of a packed panel: its even cache lines are the tile of even columns,
// the odd ones of odd columns.
template <int kRowTiles>
MAXMOE_INLINE void multiply_step(const std::byte* a, const PanelOfA& panel_of_a, const BFloat16Pair* b) {
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
}

// The lines that are written after the steps, c and the packed panel, and the ones that are packed. During the steps
// they are only prefetched: a store in flight holds up every tile load that has the same last 12 bits of an address,
// and a tile load reads 16 lines.
template <Packing kPacking>
class LinesOfSteps {
 public:
  LinesOfSteps(const Beside& beside, int64_t rows, int64_t num_steps)
      : c_(beside.c),
        c_stride_(beside.c_stride),
        target_(beside.panel.target()),
        source_(beside.panel.row()),
        source_stride_(beside.panel.stride()) {
    if (num_steps == 0) return;
    const int64_t packed_lines =
        at_most(beside.units_per_tile, beside.panel.units()) * PanelToPack::lines_of_unit(kPacking);
    c_rows_ = c_ == nullptr ? 0 : (rows + num_steps - 1) / num_steps;
    written_ = beside.prefetches_panel ? (packed_lines + num_steps - 1) / num_steps : 0;
    read_ = kPacking == Packing::row_major && !beside.panel.has_index() ? written_ : 0;
  }

  // The share of one step.
  MAXMOE_INLINE void prefetch() {
    for (int64_t i = 0; i < c_rows_; ++i, c_ += c_stride_) __builtin_prefetch(c_, 1, 3);
    if constexpr (kPacking == Packing::at_once) return;
    for (int64_t i = 0; i < written_; ++i, target_ += kCacheLineElements<BFloat16Pair>) {
      __builtin_prefetch(target_, 1, 3);
    }
    for (int64_t i = 0; i < read_; ++i, source_ += source_stride_) __builtin_prefetch(source_, 0, 3);
  }

 private:
  const BFloat16* c_;
  int64_t c_stride_;
  const BFloat16Pair* target_;
  const BFloat16* source_;
  int64_t source_stride_;
  int64_t c_rows_ = 0;  // in a step
  int64_t written_ = 0;
  int64_t read_ = 0;
};

// Computes out = a * b, or sums + a * b: kRowTiles tiles of `height` rows, kPanelColumns floats each, in the order of
// VectorX2. `b` is a packed panel.
template <int kRowTiles, Packing kPacking>
void multiply_micro_tile(const PanelOfA& panel_of_a, int64_t height, const BFloat16Pair* b, int64_t num_steps,
                         const float* sums, float* out, Beside& beside) {
  finish_stores_before_tile_loads();
  begin_sums<kRowTiles>(sums, height);
  // Copied to registers: a store to the panel could alias `beside`.
  BlockPrefetch lines = beside.lines;
  PanelToPack panel = beside.panel;
  const int64_t units = beside.units_per_tile;
  LinesOfSteps<kPacking> lines_of_steps(beside, kRowTiles * height, num_steps);
  const std::byte* a = panel_of_a.data;
  for (int64_t step = 0; step < num_steps; ++step) {
    multiply_step<kRowTiles>(a, panel_of_a, b);
    a += panel_of_a.step_bytes;
    b += kTileDepth / 2 * kPanelColumns;
    if constexpr (kPacking != Packing::row_major) {
      for (int64_t i = at_most(beside.lines_per_step, lines.num_lines()); i > 0; --i) lines.advance();
    }
    lines_of_steps.prefetch();
  }
  if constexpr (kPacking != Packing::at_once) panel.advance<kPacking>(units, lines);
  beside.lines = lines;
  beside.panel = panel;
  beside.finished.store();
  for_tiles_of_c<kRowTiles>(
      height, [&]<int kTile>(int64_t place) MAXMOE_INLINE_LAMBDA { store_tile<kTile>(out + place, kSumsStride); });
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
