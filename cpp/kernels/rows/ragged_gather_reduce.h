// Weighted sums of rows that are selected by index. All sums have the same number of terms.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/dtype.h"
#include "kernels/matrix/matrix_view.h"

namespace maxmoe {

// out[t] = sum_{j in [t * group_size, (t + 1) * group_size)} weights[j] * rows[index[j]], over j with valid[j] and
// index[j] >= 0, in the order of j. Rows that are in no sum are not read.
template <class T>
struct RaggedGatherReduce {
  ConstMatrixView<T> rows;  // [R, D]
  const int64_t* index;     // [M], each in [-1, R)
  int64_t group_size;
  const Accumulator<T>* weights;  // [M] or null for ones
  const bool* valid;              // [M] or null for all
  MatrixView<T> out;              // [M / group_size, D]
};

}  // namespace maxmoe

MAXMOE_KERNEL(ragged_gather_reduce, RaggedGatherReduce)
