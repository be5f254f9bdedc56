// Tests of ragged_sort: rows[r] = weights[slots[r]] * x[slots[r] / top_k].
#include "kernels/rows/ragged_sort.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "kernels/rows/ragged_gather_reduce.h"
#include "matrix.h"
#include "routing.h"
#include "shapes.h"

namespace maxmoe {
namespace {

template <class T>
class RaggedSortTest : public testing::Test {
 protected:
  static void check(const Matrix<T>& x, const Routing& routing, const Matrix<Accumulator<T>>* weights) {
    const auto rows = run_kernel<T>(routing.num_rows(), x.columns(), [&](MatrixView<T> view, const Executor& executor) {
      ragged_sort(
          RaggedSort<T>{x.view(), routing.slots.data(), routing.top_k, weights ? weights->view().data : nullptr, view},
          executor);
    });
    const auto want = [&](int64_t r, int64_t c) {
      const int64_t slot = routing.slots[static_cast<size_t>(r)];
      return (weights ? (*weights)(0, slot) : 1.0) * x(slot / routing.top_k, c);
    };
    expect_near(rows, want, weights ? 1.0 : 0.0);
  }
};
TYPED_TEST_SUITE(RaggedSortTest, Dtypes, DtypeNames);

TYPED_TEST(RaggedSortTest, MatchesTheLoop) {
  for (const int64_t columns : kColumns) {
    for (const int64_t num_tokens : {0, 1, 23}) {
      for (const int64_t top_k : {1, 2, 5}) {
        SCOPED_TRACE(testing::Message() << columns << " columns, " << num_tokens << " tokens, top " << top_k);
        const auto x = Matrix<TypeParam>::random(num_tokens, columns, 1);
        const auto weights = Matrix<Accumulator<TypeParam>>::random(1, num_tokens * top_k, 2);
        const Routing routing = random_routing(num_tokens, top_k, 7, 3);
        this->check(x, routing, nullptr);
        this->check(x, routing, &weights);
      }
    }
  }
}

TYPED_TEST(RaggedSortTest, AllToOneExpertInManyTasks) {
  this->check(Matrix<TypeParam>::random(300, 257, 1), all_to_one_routing(300, 4, 2), nullptr);
}

TYPED_TEST(RaggedSortTest, TokensWithoutARowAreNotRead) {
  const auto x = Matrix<TypeParam>::random(4, 9, 1).poisoned(1, 2);
  this->check(x, plan_routing(4, 2, 3, {2, 0, -1, -1, 1, -1, 2, 1}), nullptr);
}

// The sum of the rows of a token, as ragged_unsort computes it, is the token times the number of its rows.
TYPED_TEST(RaggedSortTest, SumsOfTheRowsAreTokens) {
  const Routing routing = random_routing(19, 4, 6, 1);
  const auto x = Matrix<TypeParam>::random(19, 33, 2);
  const auto rows =
      run_kernel<TypeParam>(routing.num_rows(), 33, [&](MatrixView<TypeParam> view, const Executor& executor) {
        ragged_sort(RaggedSort<TypeParam>{x.view(), routing.slots.data(), 4, nullptr, view}, executor);
      });
  const auto sums = run_kernel<TypeParam>(19, 33, [&](MatrixView<TypeParam> view, const Executor& executor) {
    ragged_gather_reduce(RaggedGatherReduce<TypeParam>{rows.view(), routing.rows.data(), 4, nullptr, nullptr, view},
                         executor);
  });
  const auto want = [&](int64_t t, int64_t c) {
    const auto begin = routing.rows.begin() + 4 * t;
    return static_cast<double>(4 - std::count(begin, begin + 4, -1)) * x(t, c);
  };
  expect_near(sums, want);
}

}  // namespace
}  // namespace maxmoe
