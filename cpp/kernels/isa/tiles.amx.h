// The tile registers of AMX: eight of 16 rows with 64 bytes, and six instructions on them. Files *.amx.cpp use them
// through the functions here, which run the instructions in the namespace amx, and an emulation in amx_emulated
// (emulated_tiles.h).
#pragma once

#include <cstdint>

#include "kernels/isa/target.simd.h"

#if MAXMOE_EMULATES_TILES
#include "kernels/isa/emulated_tiles.h"
#endif

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

constexpr int64_t kMaxTileRows = 16;
constexpr int64_t kTileRowBytes = 64;
constexpr int kNumTiles = 8;

// The configuration of the tiles, as the processor reads it.
struct alignas(64) TileConfiguration {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};

// The tiles of the calling thread are configured while an instance exists. They are released at its end: oneDNN
// configures the tiles of the same thread for itself, and a thread whose tiles are in use takes longer to switch.
class ConfiguredTiles {
 public:
  explicit ConfiguredTiles(const TileConfiguration& configuration) {
#if MAXMOE_EMULATES_TILES
    emulated_tiles::configure(&configuration);
#else
    // Not _tile_loadconfig: GCC 12 tells the optimizer that it reads 8 of the 64 bytes.
    asm volatile("ldtilecfg %0" : : "m"(configuration));
#endif
  }
  ConfiguredTiles(const ConfiguredTiles&) = delete;
  ConfiguredTiles& operator=(const ConfiguredTiles&) = delete;
  ~ConfiguredTiles() {
#if MAXMOE_EMULATES_TILES
    emulated_tiles::release();
#else
    asm volatile("tilerelease");
#endif
  }
};

// Orders the stores before it and the tile loads after it: to the compiler, load_tile reads no memory, so that it may
// keep values in registers across the loads of a micro-kernel.
MAXMOE_INLINE void finish_stores_before_tile_loads() {
  asm volatile("" : : : "memory");
}

// Loads the rows of a tile, `stride` bytes apart in memory.
template <int kTile>
MAXMOE_INLINE void load_tile(const void* address, int64_t stride) {
#if MAXMOE_EMULATES_TILES
  emulated_tiles::load(kTile, address, stride);
#else
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(address), "r"(stride), "i"(kTile));
#endif
}

template <int kTile>
MAXMOE_INLINE void store_tile(void* address, int64_t stride) {
#if MAXMOE_EMULATES_TILES
  emulated_tiles::store(kTile, address, stride);
#else
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(address), "r"(stride), "i"(kTile) : "memory");
#endif
}

template <int kTile>
MAXMOE_INLINE void zero_tile() {
#if MAXMOE_EMULATES_TILES
  emulated_tiles::zero(kTile);
#else
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
#endif
}

// Adds a product to a tile of floats: kA holds rows of pairs of bfloat16, kB a row for each pair, with a pair for each
// column of kC.
//
// The processor computes an element of the product as two chains of fused multiply-adds from zero, of the first and of
// the second elements of pairs; adds the two; and adds their sum to kC. Subnormal inputs and results are zeros.
template <int kC, int kA, int kB>
MAXMOE_INLINE void multiply_tiles() {
#if MAXMOE_EMULATES_TILES
  emulated_tiles::multiply(kC, kA, kB);
#else
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
#endif
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
