// Gathers rows by index.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/dtype.h"
#include "kernels/matrix/matrix_view.h"

namespace maxmoe {

// out[i] = weights[i] * x[index[i]] for start <= i < end and index[i] >= 0, otherwise 0.
template <class T>
struct RaggedGather {
  ConstMatrixView<T> x;           // [N, D]
  const int64_t* index;           // [M], each in [-1, N)
  const Accumulator<T>* weights;  // [M] or null for ones
  int64_t start;
  int64_t end;
  MatrixView<T> out;  // [M, D]
};

}  // namespace maxmoe

MAXMOE_KERNEL(ragged_gather, RaggedGather)
