// A matrix in another floating type.
#pragma once

#include "dtype.h"
#include "executor.h"
#include "matrix_view.h"

namespace maxmoe {

// target = source, element by element; one stride of source is 1, and target has the same one.
template <class T>
struct Widen {
  ConstMatrixView<T> source;
  MatrixView<Accumulator<T>> target;
};

// target = source rounded to nearest; both row-major.
template <class T>
struct Narrow {
  ConstMatrixView<Accumulator<T>> source;
  MatrixView<T> target;
};

}  // namespace maxmoe

MAXMOE_KERNEL(widen_matrix, Widen)
MAXMOE_KERNEL(narrow_matrix, Narrow)
