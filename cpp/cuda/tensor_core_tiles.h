// Grouped products in bfloat16 and float16 with mma.sync. A block of 8 warps computes 128 x 128 numbers at a time; the
// operands of the next steps are copied to shared memory while it multiplies.
#pragma once

#include "cuda/group_tiles.h"

namespace maxmoe::cuda::tensor_core {

constexpr int kRows = 128, kColumns = 128, kDepth = 32;  // rows and columns of a tile, depth of a step
constexpr int kStages = 3;
constexpr int kPiece = 8;  // 16-bit numbers in 16 bytes
// No two of the 8 rows that ldmatrix reads at a time begin in the same bank.
constexpr int kDepthPitch = kDepth + kPiece;
constexpr int kColumnPitch = kColumns + kPiece;

// The shared memory of a step: lhs [kRows][kDepthPitch], then rhs [kDepth][kColumnPitch] or transposed
// [kColumns][kDepthPitch].
constexpr int kLhsSize = kRows * kDepthPitch;
template <bool kTransposed>
constexpr int kStageSize = kLhsSize + (kTransposed ? kColumns * kDepthPitch : kDepth * kColumnPitch);
template <bool kTransposed>
constexpr size_t kSharedBytes = size_t{2} * kStages * kStageSize<kTransposed>;

// Copies the first `count` of 8 numbers, which may be 0 or less, and zeros for the rest.
template <bool kAligned, class T>
__device__ void copy_piece(T* to, const T* from, int64_t count) {
  if constexpr (kAligned) {
    copy_async(to, from, count <= 0 ? 0 : count < kPiece ? static_cast<int>(count) * 2 : kPiece * 2);
  } else {
    MAXMOE_UNROLL
    for (int i = 0; i < kPiece; ++i) to[i] = i < count ? from[i] : T{};
  }
}

template <class T>
using LhsRows = const T * [kRows * kDepth / kPiece / kThreads];

// The rows of lhs that a thread copies pieces of.
template <class T>
__device__ void find_lhs_rows(const Gmm<T>& a, const Tile& tile, LhsRows<T>& rows) {
  MAXMOE_UNROLL
  for (int i = 0; i < kRows * kDepth / kPiece / kThreads; ++i) {
    const int piece = static_cast<int>(threadIdx.x) + i * kThreads;
    rows[i] = lhs_row(a, tile.begin + piece / (kDepth / kPiece), tile.end);
  }
}

template <bool kTransposed, bool kAligned, class T>
__device__ void load_step(const Gmm<T>& a, const Tile& tile, const LhsRows<T>& rows, int64_t first, T* stage) {
  constexpr int kPiecesOfDepth = kDepth / kPiece;
  constexpr int kPiecesOfColumns = kColumns / kPiece;
  MAXMOE_UNROLL
  for (int i = 0; i < kRows * kPiecesOfDepth / kThreads; ++i) {
    const int piece = static_cast<int>(threadIdx.x) + i * kThreads;
    const int k = piece % kPiecesOfDepth * kPiece;
    T* const to = stage + piece / kPiecesOfDepth * kDepthPitch + k;
    const int64_t count = rows[i] == nullptr ? 0 : a.lhs.columns - first - k;
    copy_piece<kAligned>(to, count > 0 ? rows[i] + first + k : a.lhs.data, count);
  }
  // Rows of the memory of the matrix, which is the matrix or its transpose.
  const T* const matrix = a.rhs.first.data + tile.matrix * a.rhs.stride;
  const int64_t stride = kTransposed ? a.rhs.first.column_stride : a.rhs.first.row_stride;
  MAXMOE_UNROLL
  for (int i = 0; i < kColumns * kPiecesOfDepth / kThreads; ++i) {
    const int piece = static_cast<int>(threadIdx.x) + i * kThreads;
    constexpr int kPiecesOfRow = kTransposed ? kPiecesOfDepth : kPiecesOfColumns;
    const int row = piece / kPiecesOfRow;
    const int column = piece % kPiecesOfRow * kPiece;
    T* const to = stage + kLhsSize + row * (kTransposed ? kDepthPitch : kColumnPitch) + column;
    const int64_t memory_row = row + (kTransposed ? tile.first_column : first);
    const int64_t memory_column = column + (kTransposed ? first : tile.first_column);
    const bool has_row = memory_row < (kTransposed ? a.out.columns : a.lhs.columns);
    const int64_t count = has_row ? (kTransposed ? a.lhs.columns : a.out.columns) - memory_column : 0;
    copy_piece<kAligned>(to, count > 0 ? matrix + memory_row * stride + memory_column : matrix, count);
  }
}

// A warp computes 64 rows and 32 columns of the tile: 4 x 4 products of 16 x 8 numbers.
constexpr int kRowBlocks = 4, kColumnBlocks = 4;
using Sums = float[kRowBlocks][kColumnBlocks][4];

struct WarpPlace {
  int row;
  int column;
};
__device__ inline WarpPlace place_of_warp() {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  return {warp / 4 * 64, warp % 4 * 32};
}

// The left operand is [kRows][kDepthPitch] or transposed [kDepth][kColumnPitch], the right one as in a stage.
template <bool kLeftTransposed, bool kTransposed, class T>
__device__ void multiply_step(const T* lhs, const T* rhs, Sums& sums) {
  const auto [warp_row, warp_column] = place_of_warp();
  const int lane = lane_index();
  MAXMOE_UNROLL
  for (int k = 0; k < kDepth; k += 16) {
    uint32_t left[kRowBlocks][4];
    uint32_t right[kColumnBlocks / 2][4];  // two blocks of columns each
    MAXMOE_UNROLL
    for (int i = 0; i < kRowBlocks; ++i) {
      const int row = warp_row + i * 16;
      if constexpr (kLeftTransposed) {
        load_matrices<true>(left[i], lhs + (k + lane / 16 * 8 + lane % 8) * kColumnPitch + row + lane / 8 % 2 * 8);
      } else {
        load_matrices<false>(left[i], lhs + (row + lane % 16) * kDepthPitch + k + lane / 16 * 8);
      }
    }
    MAXMOE_UNROLL
    for (int j = 0; j < kColumnBlocks / 2; ++j) {
      const int column = warp_column + j * 16;
      if constexpr (kTransposed) {
        load_matrices<false>(right[j], rhs + (column + lane / 16 * 8 + lane % 8) * kDepthPitch + k + lane / 8 % 2 * 8);
      } else {
        load_matrices<true>(right[j], rhs + (k + lane % 16) * kColumnPitch + column + lane / 16 * 8);
      }
    }
    MAXMOE_UNROLL
    for (int i = 0; i < kRowBlocks; ++i) {
      MAXMOE_UNROLL
      for (int j = 0; j < kColumnBlocks; ++j) {
        const uint32_t b[2] = {right[j / 2][j % 2 * 2], right[j / 2][j % 2 * 2 + 1]};
        multiply_tile<T>(sums[i][j], left[i], b);
      }
    }
  }
}

// Lane 4 i + j of a block of 16 x 8 sums has columns 2 j and 2 j + 1 of rows i and i + 8.
template <class T>
__device__ void write_sums(const Gmm<T>& a, const Tile& tile, const Sums& sums) {
  const auto [warp_row, warp_column] = place_of_warp();
  const int lane = lane_index();
  MAXMOE_UNROLL
  for (int j = 0; j < kColumnBlocks; ++j) {
    const int64_t column = tile.first_column + warp_column + j * 8 + lane % 4 * 2;
    MAXMOE_UNROLL
    for (int e = 0; e < 2; ++e) {
      if (column + e >= a.out.columns) continue;
      const float bias = bias_of(a, tile, column + e);
      MAXMOE_UNROLL
      for (int i = 0; i < kRowBlocks * 2; ++i) {
        const int64_t row = tile.begin + warp_row + i * 8 + lane / 4;
        if (row < tile.end) a.out.row(row)[column + e] = to_narrow<T>(sums[i / 2][j][i % 2 * 2 + e] + bias);
      }
    }
  }
}

template <class T, bool kTransposed, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1) multiply(const Gmm<T> a) {
  MAXMOE_SHARED_MEMORY(memory);
  const auto stage_of = [&](int64_t step) {
    return reinterpret_cast<T*>(memory) + step % kStages * kStageSize<kTransposed>;
  };
  const int64_t steps = (a.lhs.columns + kDepth - 1) / kDepth;
  TileWalk<T, kRows, kColumns> walk(a);
  Tile tile{};
  for (int64_t index = blockIdx.x; walk.find(index, tile); index += gridDim.x) {
    if (tile.matrix < 0) {
      write_zeros<T, kRows, kColumns>(a, tile);
      continue;
    }
    LhsRows<T> rows;
    find_lhs_rows(a, tile, rows);
    // Every step commits a group of copies, also an empty one: the group of step s is complete when at most kStages - 2
    // groups are pending.
    for (int64_t s = 0; s < kStages - 1; ++s) {
      if (s < steps) load_step<kTransposed, kAligned>(a, tile, rows, s * kDepth, stage_of(s));
      commit_copies();
    }
    Sums sums = {};
    for (int64_t s = 0; s < steps; ++s) {
      wait_for_copies<kStages - 2>();
      __syncthreads();  // the copies of all threads have arrived, and the stage of step s - 1 is free
      const int64_t next = s + kStages - 1;
      if (next < steps) load_step<kTransposed, kAligned>(a, tile, rows, next * kDepth, stage_of(next));
      commit_copies();
      multiply_step<false, kTransposed>(stage_of(s), stage_of(s) + kLhsSize, sums);
    }
    wait_for_copies<0>();
    __syncthreads();  // the next tile overwrites the stages
    write_sums(a, tile, sums);
  }
}

template <class T, bool kTransposed, bool kAligned>
void start(const Gmm<T>& a, Stream stream) {
  launch("gmm", multiply<T, kTransposed, kAligned>, grid_of_tiles<T, kRows, kColumns>(a), kThreads,
         kSharedBytes<kTransposed>, stream, a);
}

// Copies of 16 bytes need rows that begin at multiples of 16 bytes. Rows may end anywhere.
inline bool begins_aligned(const void* data, int64_t stride) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride % kPiece == 0;
}

template <class T>
void run(const Gmm<T>& a, Stream stream) {
  const bool is_transposed = a.rhs.first.column_stride != 1;
  const int64_t stride = is_transposed ? a.rhs.first.column_stride : a.rhs.first.row_stride;
  const bool is_aligned = begins_aligned(a.lhs.data, a.lhs.row_stride) && begins_aligned(a.rhs.first.data, stride) &&
                          a.rhs.stride % kPiece == 0;
  if (is_transposed) {
    is_aligned ? start<T, true, true>(a, stream) : start<T, true, false>(a, stream);
  } else {
    is_aligned ? start<T, false, true>(a, stream) : start<T, false, false>(a, stream);
  }
}

}  // namespace maxmoe::cuda::tensor_core
