// The left-hand side of a product as tiles.
#pragma once

#include "kernels/executor.h"
#include "kernels/isa/tiles.amx.h"
#include "kernels/isa/transpose.simd.h"
#include "kernels/matrix/row.simd.h"
#include "kernels/product/gemm.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

constexpr int64_t kTileDepth = kTileRowBytes / int64_t{sizeof(BFloat16)};  // of the inner dimension, in a tile of A

// The largest inner dimension of a micro-panel of B. The tiles of A are packed in blocks of it.
constexpr int64_t kPanelDepth = 512;

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Number of tiles of A, or of steps of the inner dimension.
inline int64_t steps_of(Range depth) {
  return round_up(depth.size(), kTileDepth) / kTileDepth;
}

// The division of rows into tiles of equal height: 33 rows are three tiles of 11, not three of 16. A product of tiles
// takes 16 cycles with 16 rows and 13 with 8 (Xeon, family 6, model 207).
struct RowTiles {
  int64_t rows;
  int64_t count;
  int64_t height;

  explicit RowTiles(int64_t num_rows)
      : rows(num_rows),
        count((num_rows + kMaxTileRows - 1) / kMaxTileRows),
        height(count == 0 ? 0 : (num_rows + count - 1) / count) {}
  int64_t padded_rows() const { return count * height; }
};

// Two neighbouring tiles of A, or one, for each step of the inner dimension: where the first step is, and the bytes
// from one row to the next, from one tile to the next of the same step, and from one step to the next.
struct PanelOfA {
  const std::byte* data;
  int64_t row_bytes;
  int64_t tile_bytes;
  int64_t step_bytes;
};

// The tiles of A, in blocks of kPanelDepth of the inner dimension. A block is packed when it is first needed, and kept
// for the other columns and the other products of the same rows. Rows of whole tiles that are contiguous along the
// inner dimension are read where they are.
//
// Packed tiles have rows of 64 bytes. The two tiles of a step of a panel are neighbours, and steps follow each other.
// The inner dimension is padded with zeros; rows past the last one repeat it, and their results are not read.
class TilesOfA {
 public:
  TilesOfA(const GemmOperand<BFloat16>& a, int scratch_slot)
      : a_(a),
        tiles_(a.rows()),
        is_in_place_(is_read_in_place(a)),
        blocks_(scratch<BFloat16>(scratch_slot, tiles_.padded_rows() * round_up(a.columns(), kTileDepth))) {}

  // Packs the inner dimension up to `depth`.
  void prepare(int64_t depth) {
    for (; packed_depth_ < depth; packed_depth_ = block_at(packed_depth_).end) {
      const Range block = block_at(packed_depth_);
      if (a_.is_transposed) {
        pack_transposed(block);
      } else {
        pack_rows(block, is_in_place_ ? first_packed_row() : 0);
      }
    }
  }

  // The panel of the tiles `tile` and, if there is one, `tile` + 1, from `depth` on, a multiple of kTileDepth.
  PanelOfA panel(int64_t depth, int64_t tile) const {
    constexpr int64_t kBytes = sizeof(BFloat16);
    const int64_t row = tile * tiles_.height;
    if (is_in_place_ && row < first_packed_row()) {
      const int64_t stride = a_.memory.row_stride * kBytes;
      return {reinterpret_cast<const std::byte*>(a_.memory.row(row) + depth), stride, tiles_.height * stride,
              kTileRowBytes};
    }
    const Range block = block_at(depth);
    return {reinterpret_cast<const std::byte*>(tile_in_block(block, tile) + step_in_block(block, depth, tile)),
            kTileRowBytes, tile_size() * kBytes, step_size(tile) * kBytes};
  }

 private:
  // Rows a multiple of 2 KiB apart share few sets of the first-level cache, which does not hold two tiles of them.
  static bool is_read_in_place(const GemmOperand<BFloat16>& a) {
    const bool is_legal = !a.is_transposed && a.index == nullptr && a.columns() % kTileDepth == 0;
    return is_legal && a.memory.row_stride * int64_t{sizeof(BFloat16)} % 2048 != 0;
  }
  Range block_at(int64_t depth) const {
    return range_from(depth / kPanelDepth * kPanelDepth, kPanelDepth, a_.columns());
  }
  int64_t tile_size() const { return tiles_.height * kTileDepth; }
  // Elements from one step of a panel to the next: two tiles, or one if the last panel has one.
  int64_t step_size(int64_t tile) const { return tile / 2 * 2 + 1 < tiles_.count ? 2 * tile_size() : tile_size(); }
  // In place, the panel with rows past the last one.
  int64_t first_packed_row() const {
    const int64_t panel_rows = 2 * tiles_.height;
    return tiles_.padded_rows() == tiles_.rows ? tiles_.rows : (tiles_.count - 1) / 2 * panel_rows;
  }
  // The first step of a tile.
  BFloat16* tile_in_block(Range block, int64_t tile) const {
    return blocks_ + block.begin * tiles_.padded_rows() + tile / 2 * 2 * tile_size() * steps_of(block) +
           tile % 2 * tile_size();
  }

  // Elements from the first step of a block to the step at `depth`.
  int64_t step_in_block(Range block, int64_t depth, int64_t tile) const {
    return (depth - block.begin) / kTileDepth * step_size(tile);
  }

  void pack_rows(Range block, int64_t first_row) const {
    for (int64_t row = first_row; row < tiles_.padded_rows(); ++row) {
      const BFloat16* source = a_.memory_row(at_most(row, tiles_.rows - 1)) + block.begin;
      const int64_t tile = row / tiles_.height;
      BFloat16* target = tile_in_block(block, tile) + row % tiles_.height * kTileDepth;
      const int64_t step = step_size(tile);
      int64_t left = block.size();
      for (; left >= kTileDepth; left -= kTileDepth, source += kTileDepth, target += step) {
        copy_row(source, target, kTileDepth);
      }
      if (left == 0) continue;
      copy_row(source, target, left);
      zero_row(target + left, kTileDepth - left);
    }
  }

  // Rows of a are columns in memory. 32 x 32 numbers at a time become pairs of the inner dimension, by two shuffles
  // that mix columns within blocks of 16 bytes, and pairs are transposed like numbers of 32 bits.
  void pack_transposed(Range block) const {
    for (int64_t d = block.begin; d < block.end; d += kTileDepth) {
      const int64_t count = at_most(kTileDepth, block.end - d);
      const BFloat16* source[kTileDepth];
      for (int64_t i = 0; i < count; ++i) source[i] = a_.memory_row(d + i);
      int64_t tile = 0;
      int64_t row_of_tile = 0;
      for (int64_t row = 0; row < tiles_.rows; row += kTileDepth) {
        const int64_t num_rows = at_most(kTileDepth, tiles_.rows - row);
        BFloat16* targets[kTileDepth];
        for (int64_t i = 0; i < num_rows; ++i) {
          targets[i] = tile_in_block(block, tile) + step_in_block(block, d, tile) + row_of_tile * kTileDepth;
          if (++row_of_tile == tiles_.height) {
            row_of_tile = 0;
            ++tile;
          }
        }
        if (count == kTileDepth && num_rows == kTileDepth) {
          const BFloat16* rows[kTileDepth];
          for (int64_t i = 0; i < kTileDepth; ++i) rows[i] = source[i] + row;
          transpose_half<0>(rows, targets, kTileDepth);
          transpose_half<1>(rows, targets, kTileDepth);
        } else {
          transpose_padded(source, row, count, num_rows, targets);
        }
      }
      // The rows past the last one repeat it.
      const int64_t last_tile = tiles_.count - 1;
      BFloat16* const last = tile_in_block(block, last_tile) + step_in_block(block, d, last_tile);
      const int64_t filled = tiles_.rows - last_tile * tiles_.height;
      for (int64_t r = filled; r < tiles_.height; ++r) {
        copy_row(last + (filled - 1) * kTileDepth, last + r * kTileDepth, kTileDepth);
      }
    }
  }

  static constexpr int low(int lane) { return lane - lane % 8 + lane % 8 / 2 + lane % 2 * 32; }
  static constexpr int high(int lane) { return low(lane) + 4; }

  // Packs 16 of 32 rows of a: the ones with r / 4 % 2 == kHigh. Lane i of the shuffled vectors has row
  // 8 * (i / 4) + i % 4 + 4 * kHigh.
  template <int kHigh>
  static MAXMOE_INLINE void transpose_half(const BFloat16* const* rows, BFloat16* const* targets, int64_t num_rows) {
    using Halves = VectorOf<uint16_t, kVectorBytes>::type;
    Vector<uint32_t> pairs[16];
#pragma GCC unroll 16
    for (int64_t p = 0; p < 16; ++p) {
      Halves even;
      Halves odd;
      std::memcpy(&even, rows[2 * p], sizeof(even));
      std::memcpy(&odd, rows[2 * p + 1], sizeof(odd));
      pairs[p] = std::bit_cast<Vector<uint32_t>>(kHigh == 0 ? shuffled<low>(even, odd) : shuffled<high>(even, odd));
    }
    transpose_square<uint32_t>(pairs);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      const int row = 8 * (i / 4) + i % 4 + 4 * kHigh;
      if (row < num_rows) store_vector(reinterpret_cast<uint32_t*>(targets[row]), pairs[i]);
    }
  }

  // The same for `count` x `num_rows` numbers: the others are zeros, or not stored.
  static void transpose_padded(const BFloat16* const* source, int64_t first_row, int64_t count, int64_t num_rows,
                               BFloat16* const* targets) {
    BFloat16 padded[kTileDepth][kTileDepth];
    zero_row(padded[0], kTileDepth * kTileDepth);
    const BFloat16* rows[kTileDepth];
    for (int64_t i = 0; i < kTileDepth; ++i) {
      if (i < count) copy_row(source[i] + first_row, padded[i], num_rows);
      rows[i] = padded[i];
    }
    transpose_half<0>(rows, targets, num_rows);
    transpose_half<1>(rows, targets, num_rows);
  }

  GemmOperand<BFloat16> a_;
  RowTiles tiles_;
  bool is_in_place_;
  BFloat16* blocks_;
  int64_t packed_depth_ = 0;
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
