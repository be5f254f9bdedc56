// Grouped matrix multiply: every group of rows is multiplied with its own matrix.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/dtype.h"
#include "kernels/product/projection.h"

namespace maxmoe {

// out[r] is the projection of lhs[r] by rhs[g - group_offset] for the rows r of group g. Rows of groups outside
// [group_offset, group_offset + L) and rows past the last group are zero; their rows of lhs are not read. With low-rank
// factors, the reduced rows are an operand: the caller has multiplied lhs with `a`.
template <class T>
struct Gmm {
  ConstMatrixView<T> lhs;      // [R, D]
  Projection<T> rhs;           // [L, D, F]
  const int64_t* group_sizes;  // [G], sum <= R
  int64_t num_groups;          // G
  int64_t group_offset;
  const Gemm<T>* gemm;
  MatrixView<T> out;  // [R, F]

  ConstMatrixView<T> reduced = {};  // [R, r]; read with factors
};

}  // namespace maxmoe

MAXMOE_KERNEL(gmm, Gmm)
