// A task computes a range of rows of the result of one group, as a product over all rows of the group.
#include "kernels/experts/tgmm.h"

#include "kernels/experts/expert_tasks.simd.h"
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
  const auto multiply = [&](const GroupTile& rows, int64_t begin, int64_t end) {
    const int64_t local = rows.group - a.group_offset;
    // The gradients of other groups are computed by the ranks that have their matrices.
    if (local < 0 || local >= a.out.count) return;
    const MatrixView<T> out = a.out[local].row_range(begin, end);
    if (rows.begin == rows.end) return zero_rows(out);
    Product<T> product{a.rhs.row_range(rows.begin, rows.end), out, false};
    product.is_nontemporal = is_nontemporal_gradient(a.out);
    a.gemm->multiply(a.lhs.row_range(rows.begin, rows.end).column_range(begin, end).transposed(), product);
  };
  run_groups(a, a.out.first.rows, a.lhs.columns * a.rhs.columns, executor, multiply);

  // A matrix whose group is not in [0, num_groups) is zero.
  for (int64_t local = 0; local < a.out.count; ++local) {
    const int64_t group = local + a.group_offset;
    if (group < 0 || group >= a.num_groups) zero_rows(a.out[local]);
  }
}

MAXMOE_INSTANTIATE(tgmm, Tgmm)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
