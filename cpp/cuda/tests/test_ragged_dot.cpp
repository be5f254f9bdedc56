// Tests of the CUDA kernel ragged_dot: out[j] = <a[j / group_size], b[index[j]]>.
#include "emulated.h"

namespace maxmoe {
namespace {

template <class T>
class CudaRaggedDotTest : public testing::Test {};
TYPED_TEST_SUITE(CudaRaggedDotTest, Dtypes, DtypeNames);

TYPED_TEST(CudaRaggedDotTest, MatchesTheLoop) {
  using S = Accumulator<TypeParam>;
  for (const int64_t gap : kGaps) {
    for (const int64_t columns : {0, 1, 7, 8, 33, 264, 600}) {
      for (const int64_t group_size : {1, 3}) {
        SCOPED_TRACE(testing::Message() << columns << " columns, groups of " << group_size << ", gap " << gap);
        const auto a = Matrix<TypeParam>::random(7, columns, 1, gap);
        const auto b = Matrix<TypeParam>::random(5, columns, 2, gap).poisoned(4, 5);
        const std::vector<int64_t> index = random_index(7 * group_size, 4, 3);
        const auto size = static_cast<int64_t>(index.size());
        const auto out = run_emulated<S>(1, size, 3, [&](MatrixView<S> view) {
          cuda::ragged_dot(RaggedDot<TypeParam>{a.view(), b.view(), index.data(), size, group_size, view.data},
                           nullptr);
        });
        const auto want = [&](int64_t /*row*/, int64_t j) {
          const int64_t row = index[static_cast<size_t>(j)];
          double sum = 0.0;
          for (int64_t c = 0; c < columns && row >= 0; ++c) sum += a(j / group_size, c) * b(row, c);
          return sum;
        };
        expect_near(out, want, 4.0);
      }
    }
  }
}

TEST(CudaRaggedDotErrors, NameOperatorAndArgument) {
  const auto a = Matrix<float>::random(3, 8, 1);
  std::vector<float> out(3);
  for (const int64_t wrong : {-2, 3}) {
    const std::vector<int64_t> index = {0, wrong, 1};
    const std::string error = error_of(
        [&] { cuda::ragged_dot(RaggedDot<float>{a.view(), a.view(), index.data(), 3, 1, out.data()}, nullptr); });
    EXPECT_EQ(error, "maxmoe::ragged_dot: a value of index is out of range (-1 or a row of b)");
  }
}

}  // namespace
}  // namespace maxmoe
