// Tests of ragged_gather_reduce: out[t] = sum of weights[j] * rows[index[j]] over group t.
#include "kernels/rows/ragged_gather_reduce.h"

#include <gtest/gtest.h>

#include <array>

#include "kernels/rows/ragged_gather.h"
#include "matrix.h"
#include "shapes.h"

namespace maxmoe {
namespace {

template <class T>
class RaggedGatherReduceTest : public testing::Test {
 protected:
  using Weights = Matrix<Accumulator<T>>;

  static Matrix<T> run(const Matrix<T>& rows, const std::vector<int64_t>& index, int64_t group_size,
                       const Weights* weights, const bool* valid) {
    const int64_t groups = static_cast<int64_t>(index.size()) / group_size;
    return run_kernel<T>(groups, rows.columns(), [&](MatrixView<T> view, const Executor& executor) {
      ragged_gather_reduce(RaggedGatherReduce<T>{rows.view(), index.data(), group_size,
                                                 weights ? weights->view().data : nullptr, valid, view},
                           executor);
    });
  }

  static void check(const Matrix<T>& rows, const std::vector<int64_t>& index, int64_t group_size,
                    const Weights* weights, const bool* valid) {
    const auto want = [&](int64_t t, int64_t c) {
      double sum = 0.0;
      for (int64_t j = t * group_size; j < (t + 1) * group_size; ++j) {
        const int64_t source = index[static_cast<size_t>(j)];
        if (source >= 0 && (!valid || valid[j])) sum += (weights ? (*weights)(0, j) : 1.0) * rows(source, c);
      }
      return sum;
    };
    expect_near(run(rows, index, group_size, weights, valid), want);
  }
};
TYPED_TEST_SUITE(RaggedGatherReduceTest, Dtypes, DtypeNames);

TYPED_TEST(RaggedGatherReduceTest, MatchesTheLoop) {
  for (const int64_t columns : kColumns) {
    for (const int64_t group_size : {1, 2, 3, 8}) {
      for (const int64_t groups : {0, 1, 13}) {
        SCOPED_TRACE(testing::Message() << columns << " columns, " << groups << " groups of " << group_size);
        const int64_t size = groups * group_size;
        const auto rows = Matrix<TypeParam>::random(11, columns, 1);
        const auto weights = Matrix<Accumulator<TypeParam>>::random(1, size, 2);
        const std::vector<int64_t> index = random_index(size, rows.rows(), 3);
        std::array<bool, 13 * 8> valid{};
        for (size_t j = 0; j < valid.size(); ++j) valid.at(j) = j % 3 != 1;
        this->check(rows, index, group_size, nullptr, nullptr);
        this->check(rows, index, group_size, &weights, nullptr);
        this->check(rows, index, group_size, &weights, valid.data());
      }
    }
  }
}

TYPED_TEST(RaggedGatherReduceTest, ManyTasks) {
  const auto rows = Matrix<TypeParam>::random(50, 257, 1);
  const auto weights = Matrix<Accumulator<TypeParam>>::random(1, 400, 2);
  this->check(rows, random_index(400, 50, 3), 2, &weights, nullptr);
}

TYPED_TEST(RaggedGatherReduceTest, RowsInNoSumAreNotRead) {
  const auto rows = Matrix<TypeParam>::random(6, 9, 1).poisoned(2, 4);
  constexpr std::array<bool, 6> valid = {true, true, false, true, false, true};
  this->check(rows, {0, 1, 2, 5, 3, 4}, 3, nullptr, valid.data());
  this->check(rows, {0, -1, -1, -1, 5, 4}, 2, nullptr, nullptr);
}

// <gather(x), y> = <x, gather_reduce(y)> with the inverse index: each is the transpose of the other.
TYPED_TEST(RaggedGatherReduceTest, IsTheTransposeOfGather) {
  const std::vector<int64_t> index = {4, 0, -1, 3, 1};
  const std::vector<int64_t> inverse = {1, 4, -1, 3, 0, -1};
  const auto x = Matrix<TypeParam>::random(6, 17, 1);
  const auto y = Matrix<TypeParam>::random(5, 17, 2);
  const auto gathered = run_kernel<TypeParam>(5, 17, [&](MatrixView<TypeParam> view, const Executor& executor) {
    ragged_gather(RaggedGather<TypeParam>{x.view(), index.data(), nullptr, 0, 5, view}, executor);
  });
  const auto reduced = this->run(y, inverse, 1, nullptr, nullptr);
  double left = 0.0;
  double right = 0.0;
  for (int64_t c = 0; c < 17; ++c) {
    for (int64_t i = 0; i < 5; ++i) left += gathered(i, c) * y(i, c);
    for (int64_t n = 0; n < 6; ++n) right += x(n, c) * reduced(n, c);
  }
  EXPECT_NEAR(left, right, 1e-12);
}

}  // namespace
}  // namespace maxmoe
