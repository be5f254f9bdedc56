// The tiles of a grouped product. Their number is computed on the device: a grid of fixed size walks over them.
#pragma once

#include "cuda/launch.h"

namespace maxmoe::cuda {

// Rows [begin, end) of one group, columns from first_column on.
struct Tile {
  int64_t begin;
  int64_t end;  // end of the group's rows
  int64_t first_column;
  int64_t matrix;  // -1: the rows are zero
};

// Walks over the tiles of all groups, in order. The rows past the last group are one more group, without a matrix.
template <class T, int kRows, int kColumns>
class TileWalk {
 public:
  __device__ explicit TileWalk(const Gmm<T>& a)
      : a_(a), column_tiles_((a.out.columns + kColumns - 1) / kColumns), end_(end_of(0)) {}

  // Tile `index`, which must not be lower than in the last call. False past the last one.
  __device__ bool find(int64_t index, Tile& tile) {
    for (; group_ <= a_.num_groups; ++group_) {
      const int64_t row_tiles = (end_ - begin_ + kRows - 1) / kRows;
      if (index < first_tile_ + row_tiles * column_tiles_) break;
      first_tile_ += row_tiles * column_tiles_;
      begin_ = end_;
      if (group_ < a_.num_groups) end_ = end_of(group_ + 1);
    }
    if (group_ > a_.num_groups) return false;
    const int64_t local = group_ - a_.group_offset;
    const bool is_local = group_ < a_.num_groups && local >= 0 && local < a_.rhs.count;
    tile.begin = begin_ + (index - first_tile_) / column_tiles_ * kRows;
    tile.end = end_;
    tile.first_column = (index - first_tile_) % column_tiles_ * kColumns;
    tile.matrix = is_local ? local : -1;
    return true;
  }

 private:
  __device__ int64_t end_of(int64_t group) const {
    if (group == a_.num_groups) return a_.out.rows;
    const int64_t size = a_.group_sizes[group];
    MAXMOE_DEVICE_CHECK(size >= 0 && size <= a_.out.rows - begin_, "maxmoe::gmm: group_sizes does not fit the rows");
    return begin_ + size;
  }

  const Gmm<T>& a_;
  const int64_t column_tiles_;
  int64_t group_ = 0;
  int64_t first_tile_ = 0;
  int64_t begin_ = 0;
  int64_t end_;
};

// The row of lhs that row r of a tile reads, or null for a row of zeros.
template <class T>
__device__ const T* lhs_row(const Gmm<T>& a, int64_t row, int64_t end) {
  if (row >= end) return nullptr;
  if (a.index == nullptr) return a.lhs.row(row);
  const int64_t source = a.index[row];
  MAXMOE_DEVICE_CHECK(source >= -1 && source < a.lhs.rows,
                      "maxmoe::gmm: a value of index is out of range (-1 or a row of lhs)");
  return source < 0 ? nullptr : a.lhs.row(source);
}

template <class T>
__device__ Accumulator<T> bias_of(const Gmm<T>& a, const Tile& tile, int64_t column) {
  return a.bias.data == nullptr ? Accumulator<T>(0) : to_wide(a.bias.row(tile.matrix)[column]);
}

template <class T, int kRows, int kColumns>
__device__ void write_zeros(const Gmm<T>& a, const Tile& tile) {
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kColumns; i += static_cast<int>(blockDim.x)) {
    const int64_t row = tile.begin + i / kColumns;
    const int64_t column = tile.first_column + i % kColumns;
    if (row < tile.end && column < a.out.columns) a.out.row(row)[column] = T{};
  }
}

// Blocks of a grid: two for each multiprocessor, at most one for each tile.
template <class T, int kRows, int kColumns>
dim3 grid_of_tiles(const Gmm<T>& a) {
  const int64_t column_tiles = (a.out.columns + kColumns - 1) / kColumns;
  const int64_t tiles = (a.out.rows / kRows + a.num_groups + 1) * column_tiles;
  return grid_of(std::min(tiles, 2 * multiprocessors()), 1);
}

}  // namespace maxmoe::cuda
