// The matrix product that the kernels are built on.
#pragma once

#include "matrix_view.h"

namespace maxmoe {

// Rows of C that a product computes with B packed once (MC of BLIS); more rows are several such products. Kernels give
// their tasks as many rows: half as many pack B twice as often and are 4 to 15 % slower, twice as many are no faster
// and take twice the scratch memory. A multiple of the heights of micro-tiles, 6 and 12.
constexpr int64_t kMC = 264;

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
