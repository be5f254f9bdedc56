#include "tgmm.h"

#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Rows of one result per task; a task sums over all rows of its group, so that the order of sums is fixed.
constexpr int64_t kTileRowsOfResult = 264;

}  // namespace

template <class T>
void tgmm(const Tgmm<T>& a, const Executor& executor) {
  const int64_t last = a.num_groups < a.group_offset + a.out.count ? a.num_groups : a.group_offset + a.out.count;
  auto* first_row = scratch<int64_t>(kWorkListScratch, a.num_groups + 1);
  first_row[0] = 0;
  for (int64_t group = 0; group < a.num_groups; ++group) first_row[group + 1] = first_row[group] + a.group_sizes[group];

  const int64_t row_tiles = (a.out.first.rows + kTileRowsOfResult - 1) / kTileRowsOfResult;
  const auto multiply = [&](int64_t index) {
    const int64_t local = index / row_tiles;
    const int64_t group = local + a.group_offset;
    const int64_t begin = index % row_tiles * kTileRowsOfResult;
    const int64_t end = begin + kTileRowsOfResult < a.out.first.rows ? begin + kTileRowsOfResult : a.out.first.rows;
    const MatrixView<T> out = a.out[local].row_range(begin, end);
    if (group < 0 || group >= last || a.group_sizes[group] == 0) {
      for (int64_t r = 0; r < out.rows; ++r) zero_row(out.row(r), out.columns);
      return;
    }
    const auto lhs = a.lhs.row_range(first_row[group], first_row[group + 1]).column_range(begin, end);
    const auto rhs = a.rhs.row_range(first_row[group], first_row[group + 1]);
    a.gemm->multiply(lhs.transposed(), rhs, out, false);
  };
  // Writing the result counts as one row.
  const int64_t multiply_adds = (a.lhs.rows + a.out.count) * a.lhs.columns * a.rhs.columns;
  run_tasks(executor, a.out.count * row_tiles, multiply_adds, Task(multiply));
}

MAXMOE_INSTANTIATE(tgmm, Tgmm)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
