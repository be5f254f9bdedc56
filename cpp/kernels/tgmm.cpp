#include "tgmm.h"

#include "group_tiles.h"
#include "row.h"

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
  // The sum over the rows of a group is never split, so that its order is fixed: rows of the result are.
  const int64_t rows_per_task = rows_per_gradient_task(list, a.out.first.rows, threads_to_cut_for(*a.gemm, executor));
  const int64_t row_tasks = (a.out.first.rows + rows_per_task - 1) / rows_per_task;
  const auto multiply = [&](int64_t index) {
    const GroupTile& rows = list.tiles[index / row_tasks];
    const int64_t local = rows.group - a.group_offset;
    if (local < 0 || local >= a.out.count) return;
    const int64_t begin = index % row_tasks * rows_per_task;
    const int64_t end = at_most(begin + rows_per_task, a.out.first.rows);
    const MatrixView<T> out = a.out[local].row_range(begin, end);
    if (rows.begin == rows.end) return zero_rows(out);
    a.gemm->multiply(a.lhs.row_range(rows.begin, rows.end).column_range(begin, end).transposed(),
                     {a.rhs.row_range(rows.begin, rows.end), out, false});
  };
  // Of a group without rows the result is still written: as much time as one row takes.
  const int64_t multiply_adds = (a.lhs.rows + a.out.count) * a.lhs.columns * a.rhs.columns;
  run_tasks(executor, list.count * row_tasks, multiply_adds, Task(multiply));

  for (int64_t local = 0; local < a.out.count; ++local) {
    const int64_t group = local + a.group_offset;
    if (group < 0 || group >= a.num_groups) zero_rows(a.out[local]);
  }
}

MAXMOE_INSTANTIATE(tgmm, Tgmm)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
