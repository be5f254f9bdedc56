// The one matrix product that the kernels are built on.
#pragma once

#include "matrix_view.h"

namespace maxmoe {

// c = a * b, or c += a * b. One stride of a and of b is 1, so a transposed view costs nothing; c is row-major.
// Sums are in Accumulator<T>, rounded once to T. Runs on the calling thread. Any size, empty ones included.
template <class T>
class Gemm {
 public:
  Gemm() = default;
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;
  virtual ~Gemm() = default;

  virtual void multiply(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<T> c, bool accumulate) const = 0;
};

}  // namespace maxmoe
