// Tests of ragged_sort: rows[r] = weights[slots[r]] * x[slots[r] / top_k].
#include "kernels/rows/ragged_sort.h"

#include <gtest/gtest.h>

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

}  // namespace
}  // namespace maxmoe
