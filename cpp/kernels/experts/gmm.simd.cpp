// A task computes a tile of rows: it packs the matrix of its group and multiplies it with all rows of the tile.
#include "kernels/experts/gmm.h"

#include "kernels/experts/group_tiles.h"
#include "kernels/matrix/row.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// The number of columns of a task is a multiple of this, so that a task has whole micro-panels.
constexpr int64_t kColumnGrain = 128;

// Computes columns [begin, end) of the rows of a tile.
template <class T>
void multiply_tile(const Gmm<T>& a, const GroupTile& tile, int64_t begin, int64_t end) {
  MatrixView<T> out = a.out.row_range(tile.begin, tile.end).column_range(begin, end);
  // Groups outside of the local range belong to other ranks; their rows are zero here. A bias is the initial value of
  // the sums.
  const int64_t local = tile.group - a.group_offset;
  const bool is_local = local >= 0 && local < a.rhs.weights.count();
  const bool has_bias = is_local && a.rhs.has_bias();
  for (int64_t r = 0; r < out.rows && (has_bias || !is_local); ++r) {
    if (has_bias) {
      copy_row(a.rhs.bias.row(local) + begin, out.row(r), out.columns);
    } else {
      zero_row(out.row(r), out.columns);
    }
  }
  if (!is_local) return;
  Product<T> product{a.rhs.weights[local].column_range(begin, end), out, has_bias};
  if (!a.rhs.factors.empty()) {
    product.reduced = a.reduced.row_range(tile.begin, tile.end);
    product.expand = a.rhs.factors.b[local].column_range(begin, end);
  }
  a.gemm->multiply(a.lhs.row_range(tile.begin, tile.end), product);
}

}  // namespace

template <class T>
void gmm(const Gmm<T>& a, const Executor& executor) {
  const int64_t num_threads = executor.num_threads();
  const int64_t max_rows = tile_rows(a.out.rows, a.lhs.columns, num_threads);
  // A task is a tile of rows and a range of columns. The columns are divided only if the largest tile is too large for
  // load balance, because each range packs the rows of the tile again.
  const GroupTiles list = make_group_tiles(a.group_sizes, a.num_groups, max_rows);
  const int64_t columns_per_task =
      (a.out.columns / parts_of_largest(list, num_threads) / kColumnGrain + 1) * kColumnGrain;
  const int64_t column_tasks = (a.out.columns + columns_per_task - 1) / columns_per_task;
  const auto multiply = [&](int64_t index) {
    const int64_t begin = index % column_tasks * columns_per_task;
    const int64_t end = at_most(begin + columns_per_task, a.out.columns);
    multiply_tile(a, list.tiles[index / column_tasks], begin, end);
  };
  run_tasks(executor, list.count * column_tasks, list.num_rows * a.lhs.columns * a.out.columns, Task(multiply));
  // Rows past the last group are padding. They are written here, after the tasks, on the calling thread.
  for (int64_t r = list.num_rows; r < a.out.rows; ++r) zero_row(a.out.row(r), a.out.columns);
}

MAXMOE_INSTANTIATE(gmm, Gmm)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
