// Weighted sum of the rows of each token: the transpose of ragged_sort. It restores the tokens if the weights of each
// token sum to 1.
#pragma once

#include "kernels/rows/ragged_gather_reduce.h"

namespace maxmoe {

// out[t] = sum_k weights[t * K + k] * rows[row_of_slot[t * K + k]], over the slots that have a row.
template <class T>
struct RaggedUnsort {
  ConstMatrixView<T> rows;     // [R, D]
  const int64_t* row_of_slot;  // [T * K], each in [-1, R)
  int64_t top_k;
  const Accumulator<T>* weights;  // [T * K] or null for ones
  MatrixView<T> out;              // [T, D]
};

}  // namespace maxmoe

MAXMOE_KERNEL(ragged_unsort, RaggedUnsort)
