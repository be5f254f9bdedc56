// Tests of ragged_dot: out[j] = <a[j / group_size], b[index[j]]>.
#include "kernels/rows/ragged_dot.h"

#include <gtest/gtest.h>

#include <cmath>

#include "matrix.h"
#include "shapes.h"

namespace maxmoe {
namespace {

template <class T>
class RaggedDotTest : public testing::Test {
 protected:
  // The results are one row of a matrix, whose gap shows writes past the end.
  static void check(const Matrix<T>& a, const Matrix<T>& b, const std::vector<int64_t>& index, int64_t group_size) {
    using S = Accumulator<T>;
    const auto size = static_cast<int64_t>(index.size());
    const auto out = run_kernel<S>(1, size, [&](MatrixView<S> view, const Executor& executor) {
      ragged_dot(RaggedDot<T>{a.view(), b.view(), index.data(), size, group_size, view.data}, executor);
    });
    const auto want = [&](int64_t, int64_t j) {
      const int64_t row = index[static_cast<size_t>(j)];
      double sum = 0.0;
      for (int64_t c = 0; c < a.columns() && row >= 0; ++c) sum += a(j / group_size, c) * b(row, c);
      return sum;
    };
    expect_near(out, want);
  }
};
TYPED_TEST_SUITE(RaggedDotTest, Dtypes, DtypeNames);

TYPED_TEST(RaggedDotTest, MatchesTheLoop) {
  for (const int64_t columns : kColumns) {
    for (const int64_t group_size : {1, 2, 5}) {
      for (const int64_t groups : {0, 1, 9}) {
        SCOPED_TRACE(testing::Message() << columns << " columns, " << groups << " groups of " << group_size);
        const auto a = Matrix<TypeParam>::random(groups, columns, 1);
        const auto b = Matrix<TypeParam>::random(7, columns, 2);
        this->check(a, b, random_index(groups * group_size, 7, 3), group_size);
      }
    }
  }
}

TYPED_TEST(RaggedDotTest, ManyTasks) {
  this->check(Matrix<TypeParam>::random(300, 257, 1), Matrix<TypeParam>::random(40, 257, 2), random_index(600, 40, 3),
              2);
}

TYPED_TEST(RaggedDotTest, RowsThatNoIndexNamesAreNotRead) {
  const auto b = Matrix<TypeParam>::random(4, 9, 2).poisoned(1, 3);
  this->check(Matrix<TypeParam>::random(3, 9, 1), b, {0, -1, 3, 3, -1, 0}, 2);
}

}  // namespace
}  // namespace maxmoe
