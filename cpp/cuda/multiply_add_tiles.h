// Grouped products in float32 and float64, without matrix units.
#pragma once

#include "cuda/group_tiles.h"

namespace maxmoe::cuda::multiply_add {

constexpr int kRows = 64, kColumns = 64, kDepth = 16;  // sizes of a tile; a thread computes 4 rows and 4 columns
constexpr int kPitch = kRows + 4;                      // row pitch of the transposed operands in shared memory

template <class T>
constexpr size_t kSharedBytes = 2 * kDepth * kPitch * sizeof(T);

// Copies the lhs rows of a step, transposed: element (k, r). Neighbouring threads read neighbouring columns.
template <class T>
__device__ void load_lhs(const Gmm<T>& a, const Tile& tile, int64_t first, T* lhs) {
  for (int i = static_cast<int>(threadIdx.x); i < kRows * kDepth; i += kThreads) {
    const int k = i % kDepth;
    const T* const row = lhs_row(a, tile.begin + i / kDepth, tile.end);
    lhs[k * kPitch + i / kDepth] = row != nullptr && first + k < a.lhs.columns ? row[first + k] : T(0);
  }
}

// Copies the matrix of a step: element (k, n).
template <class T>
__device__ void load_rhs(const Gmm<T>& a, const Tile& tile, int64_t first, T* rhs) {
  const MatrixView<const T> matrix = a.rhs[tile.matrix];
  const bool is_transposed = matrix.column_stride != 1;
  for (int i = static_cast<int>(threadIdx.x); i < kColumns * kDepth; i += kThreads) {
    const int k = is_transposed ? i % kDepth : i / kColumns;
    const int n = is_transposed ? i / kDepth : i % kColumns;
    const bool is_inside = first + k < a.lhs.columns && tile.first_column + n < a.out.columns;
    rhs[k * kPitch + n] = is_inside ? matrix.row(first + k)[(tile.first_column + n) * matrix.column_stride] : T(0);
  }
}

// Adds the products of a step to the sums of this thread.
template <class T>
__device__ void multiply_step(const T* lhs, const T* rhs, T (&sums)[4][4]) {
  const int thread_row = static_cast<int>(threadIdx.x) / 16 * 4;
  const int thread_column = static_cast<int>(threadIdx.x) % 16 * 4;
  for (int k = 0; k < kDepth; ++k) {
    MAXMOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      MAXMOE_UNROLL
      for (int j = 0; j < 4; ++j) {
        sums[i][j] += lhs[k * kPitch + thread_row + i] * rhs[k * kPitch + thread_column + j];
      }
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) multiply(const Gmm<T> a) {
  MAXMOE_SHARED_MEMORY(memory);
  T* const lhs = reinterpret_cast<T*>(memory);
  T* const rhs = lhs + kDepth * kPitch;
  const int thread_row = static_cast<int>(threadIdx.x) / 16 * 4;
  const int thread_column = static_cast<int>(threadIdx.x) % 16 * 4;
  TileWalk<T, kRows, kColumns> walk(a);
  Tile tile{};
  for (int64_t index = blockIdx.x; walk.find(index, tile); index += gridDim.x) {
    if (tile.matrix < 0) {
      write_zeros<T, kRows, kColumns>(a, tile);
      continue;
    }
    T sums[4][4] = {};
    for (int64_t first = 0; first < a.lhs.columns; first += kDepth) {
      load_lhs(a, tile, first, lhs);
      load_rhs(a, tile, first, rhs);
      __syncthreads();
      multiply_step(lhs, rhs, sums);
      __syncthreads();  // the next step overwrites the operands
    }
    MAXMOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      MAXMOE_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int64_t row = tile.begin + thread_row + i;
        const int64_t column = tile.first_column + thread_column + j;
        if (row < tile.end && column < a.out.columns) a.out.row(row)[column] = sums[i][j] + bias_of(a, tile, column);
      }
    }
  }
}

template <class T>
void run(const Gmm<T>& a, Stream stream) {
  launch("gmm", multiply<T>, grid_of_tiles<T, kRows, kColumns>(a), kThreads, kSharedBytes<T>, stream, a);
}

}  // namespace maxmoe::cuda::multiply_add
