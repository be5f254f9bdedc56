// Transposed grouped matrix multiply: the gradient of gmm with respect to its matrices.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/dtype.h"
#include "kernels/product/gemm.h"

namespace maxmoe {

// out[l] = lhs_g^T * rhs_g over the rows of group g = l + group_offset; zero for a group without rows.
template <class T>
struct Tgmm {
  ConstMatrixView<T> lhs;      // [R, D]
  ConstMatrixView<T> rhs;      // [R, F]
  const int64_t* group_sizes;  // [G], sum <= R
  int64_t num_groups;          // G
  int64_t group_offset;
  const Gemm<T>* gemm;
  MatrixStack<T> out;  // [L, D, F]
};

}  // namespace maxmoe

MAXMOE_KERNEL(tgmm, Tgmm)
