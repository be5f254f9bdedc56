// Tests of ragged_gather: out[i] = weights[i] * x[index[i]].
#include "kernels/rows/ragged_gather.h"

#include <gtest/gtest.h>

#include "matrix.h"
#include "shapes.h"

namespace maxmoe {
namespace {

template <class T>
class RaggedGatherTest : public testing::Test {
 protected:
  using Weights = Matrix<Accumulator<T>>;

  static void check(const Matrix<T>& x, const std::vector<int64_t>& index, const Weights* weights, int64_t start,
                    int64_t end) {
    const auto size = static_cast<int64_t>(index.size());
    const auto out = run_kernel<T>(size, x.columns(), [&](MatrixView<T> view, const Executor& executor) {
      ragged_gather(RaggedGather<T>{x.view(), index.data(), weights ? weights->view().data : nullptr, start, end, view},
                    executor);
    });
    const auto want = [&](int64_t i, int64_t c) {
      const int64_t source = index[static_cast<size_t>(i)];
      if (i < start || i >= end || source < 0) return 0.0;
      return (weights ? (*weights)(0, i) : 1.0) * x(source, c);
    };
    expect_near(out, want, weights ? 1.0 : 0.0);
  }
};
TYPED_TEST_SUITE(RaggedGatherTest, Dtypes, DtypeNames);

TYPED_TEST(RaggedGatherTest, MatchesTheLoop) {
  for (const int64_t columns : kColumns) {
    for (const int64_t size : {0, 1, 5, 39}) {
      SCOPED_TRACE(testing::Message() << columns << " columns, " << size << " rows");
      const auto x = Matrix<TypeParam>::random(13, columns, 1);
      const auto weights = Matrix<Accumulator<TypeParam>>::random(1, size, 2);
      const std::vector<int64_t> index = random_index(size, x.rows(), 3);
      this->check(x, index, nullptr, 0, size);
      this->check(x, index, &weights, 0, size);
      this->check(x, index, &weights, size / 3, size - size / 4);
      this->check(x, index, nullptr, size, size);
    }
  }
}

TYPED_TEST(RaggedGatherTest, ManyTasks) {
  const auto x = Matrix<TypeParam>::random(50, 257, 1);
  const auto weights = Matrix<Accumulator<TypeParam>>::random(1, 400, 2);
  this->check(x, random_index(400, 50, 3), &weights, 17, 390);
}

// Results of 16 MiB and more are written with non-temporal stores. Rows begin anywhere in a cache line, and the gaps
// must stay intact.
TYPED_TEST(RaggedGatherTest, NonTemporalStores) {
  constexpr int64_t kColumns = 1001;
  constexpr int64_t kRows = (16 << 20) / static_cast<int64_t>(sizeof(TypeParam)) / kColumns + 1;
  const auto x = Matrix<TypeParam>::random(50, kColumns, 1);
  const auto weights = Matrix<Accumulator<TypeParam>>::random(1, kRows, 2);
  const std::vector<int64_t> index = random_index(kRows, x.rows(), 3);
  this->check(x, index, nullptr, 0, kRows);
  this->check(x, index, &weights, 5, kRows - 3);
}

TYPED_TEST(RaggedGatherTest, RowsThatNoIndexNamesAreNotRead) {
  const auto x = Matrix<TypeParam>::random(5, 9, 1).poisoned(1, 3);
  const auto weights = Matrix<Accumulator<TypeParam>>::random(1, 4, 2);
  this->check(x, {0, -1, 4, 3}, &weights, 0, 4);
  this->check(x, {0, 1, 2, 3}, &weights, 3, 4);
}

TYPED_TEST(RaggedGatherTest, NothingToGatherFrom) {
  this->check(Matrix<TypeParam>(0, 3), {-1, -1}, nullptr, 0, 2);
}

}  // namespace
}  // namespace maxmoe
