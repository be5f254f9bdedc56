// Grouped matrix multiply: every group of rows is multiplied with its own matrix.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/dtype.h"
#include "kernels/product/gemm.h"

namespace maxmoe {

// out[r] = lhs[r] * rhs[g - group_offset] + bias[g - group_offset] for the rows r of group g. Rows of groups outside
// [group_offset, group_offset + L) and rows past the last group are zero; their rows of lhs are not read. With low-rank
// factors beside rhs, reduced[r] * expand[g - group_offset] is added, where `reduced` is lhs times the other factor.
template <class T>
struct Gmm {
  ConstMatrixView<T> lhs;      // [R, D]
  WeightStack<T> rhs;          // [L, D, F]
  ConstMatrixView<T> bias;     // [L, F] or empty
  const int64_t* group_sizes;  // [G], sum <= R
  int64_t num_groups;          // G
  int64_t group_offset;
  const Gemm<T>* gemm;
  MatrixView<T> out;  // [R, F]

  ConstMatrixView<T> reduced = {};  // [R, r] or empty
  ConstMatrixStack<T> expand = {};  // [L, r, F] or empty
};

}  // namespace maxmoe

MAXMOE_KERNEL(gmm, Gmm)
