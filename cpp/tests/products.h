// What every matrix product is checked for.
#pragma once

#include <gtest/gtest.h>

#include <Eigen/Core>

#include "kernels/tile_gemm.h"
#include "matrix.h"

namespace maxmoe {

using Exact = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

template <class T>
Exact exact(const Matrix<T>& matrix) {
  Exact values(matrix.rows(), matrix.columns());
  for (int64_t r = 0; r < matrix.rows(); ++r) {
    for (int64_t c = 0; c < matrix.columns(); ++c) values(r, c) = matrix(r, c);
  }
  return values;
}

// A matrix and its transpose in memory, so that a view of either layout can be had. What lies beside them is NaN.
template <class T>
class Operand {
 public:
  Operand(int64_t rows, int64_t columns, unsigned seed)
      : straight_(Matrix<T>::random(rows, columns, seed)), turned_(columns, rows) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) turned_.element(c, r) = straight_.element(r, c);
    }
  }
  const Matrix<T>& matrix() const { return straight_; }
  ConstMatrixView<T> view(bool is_transposed) const {
    return is_transposed ? turned_.view().transposed() : straight_.view();
  }

 private:
  Matrix<T> straight_;
  Matrix<T> turned_;
};

// multiply(TileGemm<T>) against Eigen in float64: in the four layouts, with and without the values that are there.
template <class T, class Multiply>
void check_product(const Multiply& multiply, int64_t rows, int64_t depth, int64_t columns) {
  SCOPED_TRACE(testing::Message() << "[" << rows << ", " << depth << "] x [" << depth << ", " << columns << "]");
  const Operand<T> a(rows, depth, 1);
  const Operand<T> b(depth, columns, 2);
  const auto before = Matrix<T>::random(rows, columns, 3);
  const Exact product = exact(a.matrix()) * exact(b.matrix());
  for (int layout = 0; layout < 4; ++layout) {
    for (const bool accumulate : {false, true}) {
      Matrix<T> c = accumulate ? before : Matrix<T>(rows, columns);
      multiply(TileGemm<T>{a.view((layout & 1) != 0), b.view((layout & 2) != 0), c.view(), accumulate});
      const auto want = [&](int64_t r, int64_t f) { return product(r, f) + (accumulate ? before(r, f) : 0.0); };
      expect_near(c, want, 2.0);
      EXPECT_TRUE(c.gap_is_intact());
    }
  }
}

}  // namespace maxmoe
