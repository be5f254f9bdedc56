// Gathers tokens into rows that are grouped by expert.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/dtype.h"
#include "kernels/matrix/matrix_view.h"

namespace maxmoe {

// rows[r] = weights[slots[r]] * x[slots[r] / top_k]
template <class T>
struct RaggedSort {
  ConstMatrixView<T> x;  // [T, D]
  const int64_t* slots;  // [R], each in [0, T * K)
  int64_t top_k;
  const Accumulator<T>* weights;  // [T * K] or null for ones
  MatrixView<T> rows;             // [R, D]
};

}  // namespace maxmoe

MAXMOE_KERNEL(ragged_sort, RaggedSort)
