// Checks of a matrix product, shared by the tests of tile_gemm and of its variant for pairs.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "eigen_products.h"
#include "kernels/product/tiled/tile_gemm.h"
#include "matrix.h"

namespace maxmoe {

template <class T>
std::vector<double> exact(const Matrix<T>& matrix) {
  std::vector<double> values;
  values.reserve(static_cast<size_t>(matrix.rows() * matrix.columns()));
  for (int64_t r = 0; r < matrix.rows(); ++r) {
    for (int64_t c = 0; c < matrix.columns(); ++c) values.push_back(matrix(r, c));
  }
  return values;
}

// The product of two matrices in float64, row-major.
template <class T>
std::vector<double> exact_product(const Matrix<T>& a, const Matrix<T>& b) {
  return eigen_product(exact(a), exact(b), a.rows(), a.columns(), b.columns());
}

// Slack of `expect_near` for a sum of `depth` terms. Partial sums grow with it, and so does the number of their
// rounding errors; the sum of a 16-bit type is computed in float and rounded once.
template <class T>
double slack_of_sum(int64_t depth) {
  return std::is_same_v<Accumulator<T>, T> ? std::max(2.0, static_cast<double>(depth) / 640) : 2.0;
}

// A matrix that is stored row-major and column-major, so that products can be given a view of either layout. The memory
// beside it is NaN.
template <class T>
class Operand {
 public:
  Operand(int64_t rows, int64_t columns, unsigned seed)
      : row_major_(Matrix<T>::random(rows, columns, seed)), transposed_(columns, rows) {
    for (int64_t r = 0; r < rows; ++r) {
      for (int64_t c = 0; c < columns; ++c) transposed_.element(c, r) = row_major_.element(r, c);
    }
  }
  const Matrix<T>& matrix() const { return row_major_; }
  ConstMatrixView<T> view(bool is_transposed) const {
    return is_transposed ? transposed_.view().transposed() : row_major_.view();
  }

 private:
  Matrix<T> row_major_;
  Matrix<T> transposed_;
};

// Compares multiply(a, product) with Eigen in float64: every layout of a and b, with c overwritten and with c added to.
template <class T, class Multiply>
void check_product(const Multiply& multiply, int64_t rows, int64_t depth, int64_t columns) {
  SCOPED_TRACE(testing::Message() << "[" << rows << ", " << depth << "] x [" << depth << ", " << columns << "]");
  const Operand<T> a(rows, depth, 1);
  const Operand<T> b(depth, columns, 2);
  const auto before = Matrix<T>::random(rows, columns, 3);
  const std::vector<double> product = exact_product(a.matrix(), b.matrix());
  for (int layout = 0; layout < 4; ++layout) {
    for (const bool accumulate : {false, true}) {
      Matrix<T> c = accumulate ? before : Matrix<T>(rows, columns);
      multiply(a.view((layout & 1) != 0), Product<T>{b.view((layout & 2) != 0), c.view(), accumulate});
      const auto want = [&](int64_t r, int64_t f) {
        return product[static_cast<size_t>(r * columns + f)] + (accumulate ? before(r, f) : 0.0);
      };
      expect_near(c, want, slack_of_sum<T>(depth));
      EXPECT_TRUE(c.gap_is_intact());
    }
  }
}

// The same with a low-rank term of rank r: layouts of a and of the factor `expand`.
template <class T, class Multiply>
void check_low_rank_product(const Multiply& multiply, int64_t rows, int64_t depth, int64_t columns, int64_t rank) {
  SCOPED_TRACE(testing::Message() << "[" << rows << ", " << depth << "] x [" << depth << ", " << columns << "], rank "
                                  << rank);
  const Operand<T> a(rows, depth, 1);
  const Operand<T> b(depth, columns, 2);
  const Operand<T> reduced(rows, rank, 4);
  const Operand<T> expand(rank, columns, 5);
  const auto before = Matrix<T>::random(rows, columns, 3);
  const std::vector<double> product = exact_product(a.matrix(), b.matrix());
  const std::vector<double> term = exact_product(reduced.matrix(), expand.matrix());
  for (int layout = 0; layout < 8; ++layout) {
    const bool accumulate = layout == 3 || layout == 4;
    Matrix<T> c = accumulate ? before : Matrix<T>(rows, columns);
    Product<T> p{b.view((layout & 2) != 0), c.view(), accumulate};
    p.reduced = reduced.view(false);
    p.expand = expand.view((layout & 4) != 0);
    multiply(a.view((layout & 1) != 0), p);
    const auto want = [&](int64_t r, int64_t f) {
      const auto index = static_cast<size_t>(r * columns + f);
      return product[index] + term[index] + (accumulate ? before(r, f) : 0.0);
    };
    expect_near(c, want, slack_of_sum<T>(depth + rank));
    EXPECT_TRUE(c.gap_is_intact());
  }
}

}  // namespace maxmoe
