// Dot products of rows: the gradient of the weights of the other ragged operators.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/dtype.h"
#include "kernels/matrix/matrix_view.h"

namespace maxmoe {

// out[j] = <a[j / group_size], b[index[j]]> for index[j] >= 0, otherwise 0.
template <class T>
struct RaggedDot {
  ConstMatrixView<T> a;  // [M / group_size, D]
  ConstMatrixView<T> b;  // [N, D]
  const int64_t* index;  // [M], each in [-1, N)
  int64_t index_size;    // M
  int64_t group_size;
  Accumulator<T>* out;  // [M]
};

}  // namespace maxmoe

MAXMOE_KERNEL(ragged_dot, RaggedDot)
