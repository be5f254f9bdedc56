// Tests of ragged_unsort: out[t] = sum over k of weights[t * K + k] * rows[row of slot (t, k)].
#include "kernels/rows/ragged_unsort.h"

#include <gtest/gtest.h>

#include "kernels/rows/ragged_sort.h"
#include "matrix.h"
#include "routing.h"
#include "shapes.h"

namespace maxmoe {
namespace {

template <class T>
class RaggedUnsortTest : public testing::Test {
 protected:
  static Matrix<T> run(const Matrix<T>& rows, const Routing& routing, const Matrix<Accumulator<T>>* weights) {
    return run_kernel<T>(routing.num_tokens, rows.columns(), [&](MatrixView<T> view, const Executor& executor) {
      ragged_unsort(RaggedUnsort<T>{rows.view(), routing.rows.data(), routing.top_k,
                                    weights ? weights->view().data : nullptr, view},
                    executor);
    });
  }

  static void check(const Matrix<T>& rows, const Routing& routing, const Matrix<Accumulator<T>>* weights) {
    const auto want = [&](int64_t t, int64_t c) {
      double sum = 0.0;
      for (int64_t slot = t * routing.top_k; slot < (t + 1) * routing.top_k; ++slot) {
        const int64_t row = routing.rows[static_cast<size_t>(slot)];
        if (row >= 0) sum += (weights ? (*weights)(0, slot) : 1.0) * rows(row, c);
      }
      return sum;
    };
    expect_near(run(rows, routing, weights), want);
  }
};
TYPED_TEST_SUITE(RaggedUnsortTest, Dtypes, DtypeNames);

TYPED_TEST(RaggedUnsortTest, MatchesTheLoop) {
  for (const int64_t columns : kColumns) {
    for (const int64_t num_tokens : {0, 1, 23}) {
      for (const int64_t top_k : {1, 2, 5}) {
        SCOPED_TRACE(testing::Message() << columns << " columns, " << num_tokens << " tokens, top " << top_k);
        const Routing routing = random_routing(num_tokens, top_k, 7, 3);
        const auto rows = Matrix<TypeParam>::random(routing.num_rows(), columns, 1);
        const auto weights = Matrix<Accumulator<TypeParam>>::random(1, num_tokens * top_k, 2);
        this->check(rows, routing, nullptr);
        this->check(rows, routing, &weights);
      }
    }
  }
}

TYPED_TEST(RaggedUnsortTest, AllToOneExpertInManyTasks) {
  this->check(Matrix<TypeParam>::random(300, 257, 1), all_to_one_routing(300, 4, 2), nullptr);
}

// Sort, then unsort without weights, multiplies each token with the number of its rows.
TYPED_TEST(RaggedUnsortTest, UndoesTheSort) {
  const Routing routing = random_routing(19, 4, 6, 1);
  const auto x = Matrix<TypeParam>::random(19, 33, 2);
  const auto rows =
      run_kernel<TypeParam>(routing.num_rows(), 33, [&](MatrixView<TypeParam> view, const Executor& executor) {
        ragged_sort(RaggedSort<TypeParam>{x.view(), routing.slots.data(), 4, nullptr, view}, executor);
      });
  const auto want = [&](int64_t t, int64_t c) {
    const auto begin = routing.rows.begin() + 4 * t;
    return static_cast<double>(4 - std::count(begin, begin + 4, -1)) * x(t, c);
  };
  expect_near(this->run(rows, routing, nullptr), want);
}

}  // namespace
}  // namespace maxmoe
