// Tests of ragged_scatter_add: out[n] = sum of weights[j] * rows[j / group_size] over j with index[j] == n.
#include "kernels/rows/ragged_scatter_add.h"

#include <gtest/gtest.h>

#include <type_traits>
#include <vector>

#include "kernels/rows/ragged_gather.h"
#include "matrix.h"
#include "shapes.h"

namespace maxmoe {
namespace {

template <class T>
class RaggedScatterAddTest : public testing::Test {
 protected:
  using Weights = Matrix<Accumulator<T>>;

  static Matrix<T> run(const Matrix<T>& rows, const std::vector<int64_t>& index, int64_t group_size,
                       const Weights* weights, int64_t num_rows) {
    const auto size = static_cast<int64_t>(index.size());
    return run_kernel<T>(num_rows, rows.columns(), [&](MatrixView<T> view, const Executor& executor) {
      std::vector<int64_t> scratch(static_cast<size_t>(num_rows + 1 + size), -1);
      const RaggedScatterAdd<T> arguments{
          rows.view(), index.data(), size, group_size, weights ? weights->view().data : nullptr, scratch.data(), view};
      ragged_scatter_add(arguments, executor);
    });
  }

  static void check(const Matrix<T>& rows, const std::vector<int64_t>& index, int64_t group_size,
                    const Weights* weights, int64_t num_rows) {
    const auto want = [&](int64_t n, int64_t c) {
      double sum = 0.0;
      for (size_t j = 0; j < index.size(); ++j) {
        const auto position = static_cast<int64_t>(j);
        if (index[j] == n) sum += (weights ? (*weights)(0, position) : 1.0) * rows(position / group_size, c);
      }
      return sum;
    };
    expect_near(run(rows, index, group_size, weights, num_rows), want);
  }
};
TYPED_TEST_SUITE(RaggedScatterAddTest, Dtypes, DtypeNames);

TYPED_TEST(RaggedScatterAddTest, MatchesTheLoop) {
  for (const int64_t columns : kColumns) {
    for (const int64_t group_size : {1, 2, 5}) {
      for (const int64_t groups : {0, 1, 9}) {
        for (const int64_t num_rows : {0, 1, 12}) {
          SCOPED_TRACE(testing::Message() << groups << " groups of " << group_size << " into " << num_rows);
          const auto rows = Matrix<TypeParam>::random(groups, columns, 1);
          const auto weights = Matrix<Accumulator<TypeParam>>::random(1, groups * group_size, 2);
          const std::vector<int64_t> index = random_index(groups * group_size, num_rows, 3);
          this->check(rows, index, group_size, nullptr, num_rows);
          this->check(rows, index, group_size, &weights, num_rows);
        }
      }
    }
  }
}

TYPED_TEST(RaggedScatterAddTest, ManyTasks) {
  const auto rows = Matrix<TypeParam>::random(300, 257, 1);
  this->check(rows, random_index(300, 200, 3), 1, nullptr, 200);
}

TYPED_TEST(RaggedScatterAddTest, RowsWithoutAnIndexAreNotRead) {
  const auto rows = Matrix<TypeParam>::random(4, 9, 1).poisoned(1, 2);
  this->check(rows, {2, 2, -1, -1, 0, -1, 1, 2}, 2, nullptr, 4);
}

// 1 + big - big is 0 in floating point; in the order big - big + 1 it would be 1.
TYPED_TEST(RaggedScatterAddTest, SumsInTheOrderOfTheIndex) {
  if (!std::is_same_v<TypeParam, Accumulator<TypeParam>>) GTEST_SKIP() << "the rows cannot hold such numbers";
  const auto big = static_cast<Accumulator<TypeParam>>(1e17);
  Matrix<TypeParam> rows(3, 1);
  rows.element(0, 0) = narrow<TypeParam>(1);
  rows.element(1, 0) = narrow<TypeParam>(big);
  rows.element(2, 0) = narrow<TypeParam>(-big);
  EXPECT_EQ(this->run(rows, {0, 0, 0}, 1, nullptr, 1)(0, 0), 0.0);
}

// <scatter_add(y), x> = <y, gather(x)>: each is the transpose of the other.
TYPED_TEST(RaggedScatterAddTest, IsTheTransposeOfGather) {
  const std::vector<int64_t> index = {4, 0, -1, 3, 1};
  const auto x = Matrix<TypeParam>::random(6, 17, 1);
  const auto y = Matrix<TypeParam>::random(5, 17, 2);
  const auto gathered = run_kernel<TypeParam>(5, 17, [&](MatrixView<TypeParam> view, const Executor& executor) {
    ragged_gather(RaggedGather<TypeParam>{x.view(), index.data(), nullptr, 0, 5, view}, executor);
  });
  const auto scattered = this->run(y, index, 1, nullptr, 6);
  double left = 0.0;
  double right = 0.0;
  for (int64_t c = 0; c < 17; ++c) {
    for (int64_t n = 0; n < 6; ++n) left += scattered(n, c) * x(n, c);
    for (int64_t i = 0; i < 5; ++i) right += y(i, c) * gathered(i, c);
  }
  EXPECT_NEAR(left, right, 1e-12);
}

}  // namespace
}  // namespace maxmoe
