// Adds rows to the rows that an index names: the transpose of ragged_gather and ragged_gather_reduce.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/dtype.h"
#include "kernels/matrix/matrix_view.h"

namespace maxmoe {

// out[n] = sum_{j : index[j] == n} weights[j] * rows[j / group_size], in the order of j. A row that no index names is
// zero. Each row of out is summed by one task: no atomics, and the order of a sum does not depend on the number of
// threads.
template <class T>
struct RaggedScatterAdd {
  ConstMatrixView<T> rows;  // [M / group_size, D]
  const int64_t* index;     // [M], each in [-1, N)
  int64_t index_size;       // M
  int64_t group_size;
  const Accumulator<T>* weights;  // [M] or null for ones
  int64_t* scratch;               // [N + 1 + M]; for the CUDA kernel cuda::ragged_scatter_add_scratch(M, N)
  MatrixView<T> out;              // [N, D]
};

}  // namespace maxmoe

MAXMOE_KERNEL(ragged_scatter_add, RaggedScatterAdd)
