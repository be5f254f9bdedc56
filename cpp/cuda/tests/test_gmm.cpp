// Tests of the CUDA kernel gmm against plain loops.
#include <numeric>

#include "emulated.h"

namespace maxmoe {
namespace {

struct GmmCase {
  std::vector<int64_t> group_sizes;
  int64_t num_matrices;  // L
  int64_t group_offset;
  int64_t padding;  // rows past the last group
  int64_t depth;    // D
  int64_t columns;  // F
};

template <class T>
class CudaGmmTest : public testing::Test {
 protected:
  static void check(const GmmCase& c, bool is_transposed, bool is_gathered, bool is_biased, int64_t gap) {
    SCOPED_TRACE(testing::Message() << "[" << c.depth << ", " << c.columns << "], " << c.num_matrices << " matrices"
                                    << (is_transposed ? ", transposed" : "") << (is_gathered ? ", gathered" : "")
                                    << ", gap " << gap);
    const int64_t num_rows = std::accumulate(c.group_sizes.begin(), c.group_sizes.end(), c.padding);
    const auto lhs = Matrix<T>::random(is_gathered ? 21 : num_rows, c.depth, 1, gap);
    const std::vector<int64_t> index = random_index(num_rows, 21, 2);
    const int64_t memory_rows = is_transposed ? c.columns : c.depth;
    const auto rhs = Matrix<T>::random(c.num_matrices * memory_rows, is_transposed ? c.depth : c.columns, 3, gap);
    const auto bias = Matrix<T>::random(c.num_matrices, c.columns, 4);
    ConstMatrixStack<T> matrices = stack(rhs, c.num_matrices);
    if (is_transposed) matrices.first = matrices.first.transposed();
    const auto out = run_emulated<T>(num_rows, c.columns, gap, [&](MatrixView<T> view) {
      cuda::gmm(cuda::Gmm<T>{lhs.view(), is_gathered ? index.data() : nullptr, matrices,
                             is_biased ? bias.view() : ConstMatrixView<T>{}, c.group_sizes.data(),
                             static_cast<int64_t>(c.group_sizes.size()), c.group_offset, view},
                nullptr);
    });
    std::vector<int64_t> group_of_row(static_cast<size_t>(num_rows), -1);
    size_t row = 0;
    for (size_t g = 0; g < c.group_sizes.size(); ++g) {
      for (int64_t i = 0; i < c.group_sizes[g]; ++i) group_of_row[row++] = static_cast<int64_t>(g) - c.group_offset;
    }
    const auto want = [&](int64_t r, int64_t f) {
      const int64_t matrix = group_of_row[static_cast<size_t>(r)];
      if (matrix < 0 || matrix >= c.num_matrices) return 0.0;
      const int64_t source = is_gathered ? index[static_cast<size_t>(r)] : r;
      double sum = is_biased ? bias(matrix, f) : 0.0;
      for (int64_t d = 0; d < c.depth && source >= 0; ++d) {
        const int64_t first = matrix * memory_rows;
        sum += lhs(source, d) * (is_transposed ? rhs(first + f, d) : rhs(first + d, f));
      }
      return sum;
    };
    expect_near(out, want, 4.0);
  }
};
TYPED_TEST_SUITE(CudaGmmTest, Dtypes, DtypeNames);

TYPED_TEST(CudaGmmTest, MatchesTheLoop) {
  const std::vector<GmmCase> cases = {
      {{70, 0, 1, 130}, 4, 0, 0, 72, 136}, {{3, 7, 0, 20, 9}, 4, 1, 5, 40, 24}, {{5}, 1, 0, 0, 7, 9}};
  for (const GmmCase& c : cases) {
    for (const bool is_transposed : {false, true}) {
      const bool is_odd = c.depth % 8 != 0;
      this->check(c, is_transposed, !is_transposed, is_transposed, 8);
      if (c.depth < 72) this->check(c, is_transposed, is_transposed || is_odd, !is_transposed, 3);
    }
  }
}

TYPED_TEST(CudaGmmTest, NothingToMultiply) {
  this->check({{0, 0}, 2, 0, 0, 8, 8}, false, false, false, 8);
  this->check({{2, 3}, 2, 0, 0, 0, 8}, false, false, true, 8);
  this->check({{}, 0, 0, 4, 8, 8}, false, false, false, 8);
  this->check({{2}, 1, 0, 0, 8, 0}, false, false, false, 8);
}

// The rows of groups without a local matrix are not read.
TYPED_TEST(CudaGmmTest, ForeignRowsAreNotRead) {
  const auto lhs = Matrix<TypeParam>::random(6, 8, 1, 8).poisoned(0, 2).poisoned(4, 6);
  const auto rhs = Matrix<TypeParam>::random(8, 8, 2, 8);
  const std::vector<int64_t> group_sizes = {2, 2, 1};
  const auto out = run_emulated<TypeParam>(6, 8, 8, [&](MatrixView<TypeParam> view) {
    cuda::gmm(cuda::Gmm<TypeParam>{lhs.view(), nullptr, stack(rhs, 1), {}, group_sizes.data(), 3, 1, view}, nullptr);
  });
  for (int64_t r = 0; r < 6; ++r) {
    for (int64_t c = 0; c < 8; ++c) {
      const bool is_local = r == 2 || r == 3;
      EXPECT_TRUE(is_local ? std::isfinite(out(r, c)) : out(r, c) == 0.0) << "row " << r;
    }
  }
}

TEST(CudaGmmErrors, NameOperatorAndArgument) {
  const auto lhs = Matrix<float>::random(4, 8, 1);
  const auto rhs = Matrix<float>::random(16, 8, 2);
  Matrix<float> out(4, 8);
  const auto error = [&](std::vector<int64_t> group_sizes, std::vector<int64_t> index) {
    return error_of([&] {
      cuda::gmm(cuda::Gmm<float>{lhs.view(), index.data(), stack(rhs, 2), {}, group_sizes.data(), 2, 0, out.view()},
                nullptr);
    });
  };
  EXPECT_EQ(error({2, 2}, {0, 1, 2, 3}), "");
  EXPECT_EQ(error({2, 3}, {0, 1, 2, 3}), "maxmoe::gmm: group_sizes does not fit the rows");
  EXPECT_EQ(error({-1, 3}, {0, 1, 2, 3}), "maxmoe::gmm: group_sizes does not fit the rows");
  for (const int64_t wrong : {-2, 4}) {
    EXPECT_EQ(error({2, 2}, {0, wrong, 2, 3}), "maxmoe::gmm: a value of index is out of range (-1 or a row of lhs)");
  }
}

}  // namespace
}  // namespace maxmoe
