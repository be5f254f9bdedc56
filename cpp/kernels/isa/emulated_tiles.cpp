#include "kernels/isa/emulated_tiles.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <stdexcept>
#include <string>

namespace maxmoe::emulated_tiles {
namespace {

constexpr int64_t kNumTiles = 8;
constexpr int64_t kMaxRows = 16;
constexpr int64_t kMaxRowBytes = 64;
constexpr int64_t kMaxColumns = kMaxRowBytes / 4;

struct Tile {
  int64_t rows = 0;
  int64_t row_bytes = 0;
  std::array<std::array<std::byte, kMaxRowBytes>, kMaxRows> memory{};
};

struct Tiles {
  bool is_configured = false;
  std::array<Tile, kNumTiles> tiles;
};

thread_local Tiles state;

Tile& tile_at(int tile) {
  if (!state.is_configured) throw std::logic_error("tiles are used before they are configured");
  return state.tiles.at(static_cast<size_t>(tile));
}

// A bfloat16 of a pair, widened.
float element(uint32_t pair, bool is_second) {
  return std::bit_cast<float>(is_second ? pair & 0xffff0000U : pair << 16);
}

double without_subnormal(float value) {
  return std::fpclassify(value) == FP_SUBNORMAL ? 0.0 : value;
}

// The nearest float; a result that is subnormal after rounding is zero.
float rounded(double sum) {
  constexpr double kSmallest = 0x1p-126 - 0x1p-151;  // rounds to the smallest normal number
  if (std::fabs(sum) < kSmallest) return std::copysign(0.0F, static_cast<float>(sum));
  if (std::fabs(sum) < 0x1p-126) return std::copysign(0x1p-126F, static_cast<float>(sum));
  return static_cast<float>(sum);
}

using Row = std::array<uint32_t, kMaxColumns>;

Row row_of(const Tile& tile, int64_t r) {
  return std::bit_cast<Row>(tile.memory[static_cast<size_t>(r)]);
}

}  // namespace

// The product of two bfloat16 is exact in double, and its 16 bits leave so much room that two roundings, to double and
// to float, give the float that one gives.
float multiply_add(float sum, float a, float b) {
  return rounded(without_subnormal(sum) + without_subnormal(a) * without_subnormal(b));
}

float add(float a, float b) {
  return rounded(without_subnormal(a) + without_subnormal(b));
}

void configure(const void* configuration) {
  std::array<uint8_t, 64> bytes{};
  std::memcpy(bytes.data(), configuration, bytes.size());
  if (bytes[0] != 1 || bytes[1] != 0) throw std::logic_error("palette must be 1 and start_row 0");
  state = Tiles{true, {}};
  for (size_t i = 0; i < kNumTiles; ++i) {
    state.tiles[i].row_bytes = bytes[16 + 2 * i] + 256 * bytes[17 + 2 * i];
    state.tiles[i].rows = bytes[48 + i];
    if (state.tiles[i].row_bytes > kMaxRowBytes || state.tiles[i].rows > kMaxRows) {
      throw std::logic_error("tile " + std::to_string(i) + " has more than 16 rows of 64 bytes");
    }
  }
}

void release() {
  state = {};
}

void load(int tile, const void* address, int64_t stride) {
  Tile& target = tile_at(tile);
  target.memory = {};
  for (int64_t r = 0; r < target.rows; ++r) {
    std::memcpy(target.memory[static_cast<size_t>(r)].data(), static_cast<const std::byte*>(address) + r * stride,
                static_cast<size_t>(target.row_bytes));
  }
}

void store(int tile, void* address, int64_t stride) {
  const Tile& source = tile_at(tile);
  for (int64_t r = 0; r < source.rows; ++r) {
    std::memcpy(static_cast<std::byte*>(address) + r * stride, source.memory[static_cast<size_t>(r)].data(),
                static_cast<size_t>(source.row_bytes));
  }
}

void zero(int tile) {
  tile_at(tile).memory = {};
}

void multiply(int c, int a, int b) {
  Tile& sums = tile_at(c);
  const Tile& left = tile_at(a);
  const Tile& right = tile_at(b);
  if (left.rows != sums.rows || right.row_bytes != sums.row_bytes || left.row_bytes != 4 * right.rows) {
    throw std::logic_error("the sizes of tiles " + std::to_string(c) + ", " + std::to_string(a) + " and " +
                           std::to_string(b) + " do not fit");
  }
  for (int64_t r = 0; r < sums.rows; ++r) {
    const Row left_pairs = row_of(left, r);
    std::array<std::array<float, kMaxColumns>, 2> chains{};
    for (int64_t k = 0; k < right.rows; ++k) {
      const Row right_pairs = row_of(right, k);
      for (size_t half = 0; half < 2; ++half) {
        const float factor = element(left_pairs[static_cast<size_t>(k)], half == 1);
        for (size_t j = 0; j < kMaxColumns; ++j) {
          chains[half][j] = multiply_add(chains[half][j], factor, element(right_pairs[j], half == 1));
        }
      }
    }
    auto& row = sums.memory[static_cast<size_t>(r)];
    auto values = std::bit_cast<std::array<float, kMaxColumns>>(row);
    for (size_t j = 0; j < static_cast<size_t>(sums.row_bytes / 4); ++j) {
      values[j] = add(values[j], add(chains[0][j], chains[1][j]));
    }
    row = std::bit_cast<std::array<std::byte, kMaxRowBytes>>(values);
  }
}

}  // namespace maxmoe::emulated_tiles
