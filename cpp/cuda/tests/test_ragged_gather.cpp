// Tests of the CUDA kernel ragged_gather: out[i] = weights[i] * x[index[i]].
#include "emulated.h"

namespace maxmoe {
namespace {

template <class T>
class CudaRaggedGatherTest : public testing::Test {
 protected:
  using Weights = Matrix<Accumulator<T>>;

  static void check(const Matrix<T>& x, const std::vector<int64_t>& index, const Weights* weights, int64_t start,
                    int64_t end, int64_t gap) {
    const auto size = static_cast<int64_t>(index.size());
    const auto out = run_emulated<T>(size, x.columns(), gap, [&](MatrixView<T> view) {
      cuda::ragged_gather(
          RaggedGather<T>{x.view(), index.data(), weights ? weights->view().data : nullptr, start, end, view}, nullptr);
    });
    const auto want = [&](int64_t i, int64_t c) {
      const int64_t source = index[static_cast<size_t>(i)];
      if (i < start || i >= end || source < 0) return 0.0;
      return (weights ? (*weights)(0, i) : 1.0) * x(source, c);
    };
    expect_near(out, want, weights ? 1.0 : 0.0);
  }
};
TYPED_TEST_SUITE(CudaRaggedGatherTest, Dtypes, DtypeNames);

TYPED_TEST(CudaRaggedGatherTest, MatchesTheLoop) {
  for (const int64_t gap : kGaps) {
    for (const int64_t columns : kEmulatedColumns) {
      for (const int64_t size : {0, 1, 19}) {
        SCOPED_TRACE(testing::Message() << columns << " columns, " << size << " rows, gap " << gap);
        const auto x = Matrix<TypeParam>::random(13, columns, 1, gap);
        const auto weights = Matrix<Accumulator<TypeParam>>::random(1, size, 2);
        const std::vector<int64_t> index = random_index(size, x.rows(), 3);
        this->check(x, index, nullptr, 0, size, gap);
        this->check(x, index, &weights, size / 3, size - size / 4, gap);
      }
    }
  }
}

TYPED_TEST(CudaRaggedGatherTest, RowsThatNoIndexNamesAreNotRead) {
  const auto x = Matrix<TypeParam>::random(5, 9, 1).poisoned(1, 3);
  const auto weights = Matrix<Accumulator<TypeParam>>::random(1, 4, 2);
  this->check(x, {0, -1, 4, 3}, &weights, 0, 4, 3);
  this->check(x, {0, 1, 2, 3}, &weights, 3, 4, 3);
  this->check(x, {0, 1, 2, 3}, &weights, 0, 1, 3);
  this->check(Matrix<TypeParam>(0, 3), {-1, -1}, nullptr, 0, 2, 3);
}

TEST(CudaRaggedGatherErrors, NameOperatorAndArgument) {
  const auto x = Matrix<float>::random(5, 8, 1);
  Matrix<float> out(3, 8);
  for (const int64_t wrong : {-2, 5}) {
    const std::vector<int64_t> index = {0, wrong, 1};
    const std::string error = error_of(
        [&] { cuda::ragged_gather(RaggedGather<float>{x.view(), index.data(), nullptr, 0, 3, out.view()}, nullptr); });
    EXPECT_EQ(error, "maxmoe::ragged_gather: a value of index is out of range (-1 or a row of x)");
  }
}

}  // namespace
}  // namespace maxmoe
