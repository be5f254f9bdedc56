// A task computes a range of rows of the result of one group, as a product over all rows of the group.
#include "kernels/experts/tgmm.h"

#include "kernels/experts/group_tiles.h"
#include "kernels/matrix/row.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

template <class T>
void zero_rows(MatrixView<T> out) {
  for (int64_t r = 0; r < out.rows; ++r) zero_row(out.row(r), out.columns);
}

}  // namespace

template <class T>
void tgmm(const Tgmm<T>& a, const Executor& executor) {
  const GroupTiles list = make_whole_groups(a.group_sizes, a.num_groups, kWorkListScratch);
  // The sum over the rows of a group is not split, so that its order does not depend on the number of threads. The rows
  // of the result are split instead.
  const int64_t rows_per_task = rows_per_gradient_task(list, a.out.first.rows, threads_for_tiling(*a.gemm, executor));
  const int64_t row_tasks = (a.out.first.rows + rows_per_task - 1) / rows_per_task;
  const auto multiply = [&](int64_t index) {
    const GroupTile& rows = list.tiles[index / row_tasks];
    const int64_t local = rows.group - a.group_offset;
    // The gradients of other groups are computed by the ranks that have their matrices.
    if (local < 0 || local >= a.out.count) return;
    const int64_t begin = index % row_tasks * rows_per_task;
    const int64_t end = at_most(begin + rows_per_task, a.out.first.rows);
    const MatrixView<T> out = a.out[local].row_range(begin, end);
    if (rows.begin == rows.end) return zero_rows(out);
    Product<T> product{a.rhs.row_range(rows.begin, rows.end), out, false};
    product.is_nontemporal = is_nontemporal_gradient(a.out);
    a.gemm->multiply(a.lhs.row_range(rows.begin, rows.end).column_range(begin, end).transposed(), product);
  };
  // Writing the result of a group, zeros if it has no rows, counts as one row.
  const int64_t multiply_adds = (a.lhs.rows + a.out.count) * a.lhs.columns * a.rhs.columns;
  run_tasks(executor, list.count * row_tasks, multiply_adds, Task(multiply));

  // A matrix whose group is not in [0, num_groups) is zero.
  for (int64_t local = 0; local < a.out.count; ++local) {
    const int64_t group = local + a.group_offset;
    if (group < 0 || group >= a.num_groups) zero_rows(a.out[local]);
  }
}

MAXMOE_INSTANTIATE(tgmm, Tgmm)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
