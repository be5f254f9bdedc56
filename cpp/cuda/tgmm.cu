// The rows of a group are the depth of its product. Both operands are read as they lie in memory, row by row.
#include "cuda/multiply_add_tiles.h"
#include "cuda/tensor_core_tiles.h"

namespace maxmoe::cuda {
namespace {

// A part of one matrix of the result, and the rows [begin, end) that are summed.
struct GradientTile {
  int64_t begin;
  int64_t end;
  int64_t matrix;
  int64_t first_row;
  int64_t first_column;
};

// Walks over the tiles of all matrices, in order.
template <class T, int kRows, int kColumns>
class GradientWalk {
 public:
  __device__ explicit GradientWalk(const Tgmm<T>& a) : a_(a) {}

  // Tile `index`, which must not be lower than in the last call. False past the last one.
  __device__ bool find(int64_t index, GradientTile& tile) {
    const int64_t column_tiles = (a_.rhs.columns + kColumns - 1) / kColumns;
    const int64_t tiles = (a_.lhs.columns + kRows - 1) / kRows * column_tiles;
    tile.matrix = index / tiles;
    if (tile.matrix >= a_.out.count) return false;
    tile.first_row = index % tiles / column_tiles * kRows;
    tile.first_column = index % column_tiles * kColumns;
    const int64_t group = tile.matrix + a_.group_offset;
    for (; group_ < group && group_ < a_.num_groups; ++group_) begin_ += size_of(group_);
    tile.begin = begin_;
    tile.end = group >= 0 && group < a_.num_groups ? begin_ + size_of(group) : begin_;
    return true;
  }

 private:
  __device__ int64_t size_of(int64_t group) const {
    const int64_t size = a_.group_sizes[group];
    MAXMOE_DEVICE_CHECK(size >= 0 && size <= a_.lhs.rows - begin_, "maxmoe::tgmm: group_sizes does not fit the rows");
    return size;
  }

  const Tgmm<T>& a_;
  int64_t group_ = 0;
  int64_t begin_ = 0;  // first row of group_
};

template <class T, int kRows, int kColumns>
dim3 grid_of_gradients(const Tgmm<T>& a) {
  const int64_t tiles = (a.lhs.columns + kRows - 1) / kRows * ((a.rhs.columns + kColumns - 1) / kColumns) * a.out.count;
  return grid_of(std::min(tiles, 2 * multiprocessors()), 1);
}

namespace multiply_add_rows {

using namespace multiply_add;

// Copies rows from `first` on: element (k, c). Rows from `end` on and columns past the last one are zero.
template <class T>
__device__ void load_rows(ConstMatrixView<T> m, int64_t first, int64_t end, int64_t first_column, T* to) {
  for (int i = static_cast<int>(threadIdx.x); i < kDepth * kColumns; i += kThreads) {
    const int64_t row = first + i / kColumns;
    const int64_t column = first_column + i % kColumns;
    to[i / kColumns * kPitch + i % kColumns] = row < end && column < m.columns ? m.row(row)[column] : T(0);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, 1) multiply(const Tgmm<T> a) {
  MAXMOE_SHARED_MEMORY(memory);
  T* const lhs = reinterpret_cast<T*>(memory);
  T* const rhs = lhs + kDepth * kPitch;
  GradientWalk<T, kRows, kColumns> walk(a);
  GradientTile tile{};
  for (int64_t index = blockIdx.x; walk.find(index, tile); index += gridDim.x) {
    T sums[4][4] = {};
    for (int64_t first = tile.begin; first < tile.end; first += kDepth) {
      load_rows(a.lhs, first, tile.end, tile.first_row, lhs);
      load_rows(a.rhs, first, tile.end, tile.first_column, rhs);
      __syncthreads();
      multiply_step(lhs, rhs, sums);
      __syncthreads();  // the next step overwrites the operands
    }
    const MatrixView<T> out = a.out[tile.matrix];
    MAXMOE_UNROLL
    for (int i = 0; i < 4; ++i) {
      MAXMOE_UNROLL
      for (int j = 0; j < 4; ++j) {
        const int64_t row = tile.first_row + static_cast<int>(threadIdx.x) / 16 * 4 + i;
        const int64_t column = tile.first_column + static_cast<int>(threadIdx.x) % 16 * 4 + j;
        if (row < a.lhs.columns && column < a.rhs.columns) out.row(row)[column] = sums[i][j];
      }
    }
  }
}

template <class T>
void run(const Tgmm<T>& a, Stream stream) {
  launch("tgmm", multiply<T>, grid_of_gradients<T, kRows, kColumns>(a), kThreads, kSharedBytes<T>, stream, a);
}

}  // namespace multiply_add_rows

namespace tensor_core_rows {

using namespace tensor_core;

static_assert(kRows == kColumns);  // both operands of a step are [kDepth][kColumnPitch]
constexpr int kOperandSize = kDepth * kColumnPitch;
constexpr size_t kBytes = size_t{2} * kStages * 2 * kOperandSize;

// Copies the rows of a step from `first` on. Rows from `end` on and columns past the last one are zero.
template <bool kAligned, class T>
__device__ void load_rows(ConstMatrixView<T> m, int64_t first, int64_t end, int64_t first_column, T* to) {
  constexpr int kPiecesOfRow = kColumns / kPiece;
  MAXMOE_UNROLL
  for (int i = 0; i < kDepth * kPiecesOfRow / kThreads; ++i) {
    const int piece = static_cast<int>(threadIdx.x) + i * kThreads;
    const int64_t row = first + piece / kPiecesOfRow;
    const int column = piece % kPiecesOfRow * kPiece;
    const int64_t count = row < end ? m.columns - first_column - column : 0;
    copy_piece<kAligned>(to + piece / kPiecesOfRow * kColumnPitch + column,
                         count > 0 ? m.row(row) + first_column + column : m.data, count);
  }
}

template <class T>
__device__ void write_gradient(const Tgmm<T>& a, const GradientTile& tile, const Sums& sums) {
  const auto [warp_row, warp_column] = place_of_warp();
  const int lane = lane_index();
  const MatrixView<T> out = a.out[tile.matrix];
  MAXMOE_UNROLL
  for (int i = 0; i < kRowBlocks * 2; ++i) {
    const int64_t row = tile.first_row + warp_row + i * 8 + lane / 4;
    if (row >= a.lhs.columns) continue;
    MAXMOE_UNROLL
    for (int j = 0; j < kColumnBlocks * 2; ++j) {
      const int64_t column = tile.first_column + warp_column + j / 2 * 8 + lane % 4 * 2 + j % 2;
      if (column < a.rhs.columns) out.row(row)[column] = to_narrow<T>(sums[i / 2][j / 2][i % 2 * 2 + j % 2]);
    }
  }
}

template <class T, bool kAligned>
__global__ void __launch_bounds__(kThreads, 1) multiply(const Tgmm<T> a) {
  MAXMOE_SHARED_MEMORY(memory);
  const auto stage_of = [&](int64_t step) { return reinterpret_cast<T*>(memory) + step % kStages * 2 * kOperandSize; };
  GradientWalk<T, kRows, kColumns> walk(a);
  GradientTile tile{};
  for (int64_t index = blockIdx.x; walk.find(index, tile); index += gridDim.x) {
    const int64_t steps = (tile.end - tile.begin + kDepth - 1) / kDepth;
    const auto load_step = [&](int64_t step) {
      const int64_t first = tile.begin + step * kDepth;
      load_rows<kAligned>(a.lhs, first, tile.end, tile.first_row, stage_of(step));
      load_rows<kAligned>(a.rhs, first, tile.end, tile.first_column, stage_of(step) + kOperandSize);
    };
    // The copies of a step are one group, as in gmm.
    for (int64_t s = 0; s < kStages - 1; ++s) {
      if (s < steps) load_step(s);
      commit_copies();
    }
    Sums sums = {};
    for (int64_t s = 0; s < steps; ++s) {
      wait_for_copies<kStages - 2>();
      __syncthreads();  // the copies of all threads have arrived, and the stage of step s - 1 is free
      if (s + kStages - 1 < steps) load_step(s + kStages - 1);
      commit_copies();
      multiply_step<true, false>(stage_of(s), stage_of(s) + kOperandSize, sums);
    }
    wait_for_copies<0>();
    __syncthreads();  // the next tile overwrites the stages
    write_gradient(a, tile, sums);
  }
}

template <class T>
void run(const Tgmm<T>& a, Stream stream) {
  const bool is_aligned = begins_aligned(a.lhs.data, a.lhs.row_stride) && begins_aligned(a.rhs.data, a.rhs.row_stride);
  launch("tgmm", is_aligned ? multiply<T, true> : multiply<T, false>, grid_of_gradients<T, kRows, kColumns>(a),
         kThreads, kBytes, stream, a);
}

}  // namespace tensor_core_rows
}  // namespace

template <class T>
void tgmm(const Tgmm<T>& a, Stream stream) {
  if (a.out.count == 0 || a.lhs.columns == 0 || a.rhs.columns == 0) return;
  if constexpr (sizeof(T) == 2) {
    tensor_core_rows::run(a, stream);
  } else {
    multiply_add_rows::run(a, stream);
  }
}

MAXMOE_INSTANTIATE_CUDA(tgmm, Tgmm)

}  // namespace maxmoe::cuda
