// Tests of gmm: out[r] = lhs[r] * rhs[g - group_offset] + bias[g - group_offset] for the rows r of group g.
#include "kernels/experts/gmm.h"

#include <gtest/gtest.h>

#include <vector>

#include "eigen_products.h"
#include "matrix.h"

namespace maxmoe {
namespace {

struct Case {
  std::vector<int64_t> group_sizes;
  int64_t num_matrices;
  int64_t group_offset;
  int64_t rows_past_the_last_group;
};

const std::vector<Case> kCases = {
    {{}, 0, 0, 3},           {{0, 0}, 2, 0, 0},          {{1}, 1, 0, 0},
    {{3, 0, 5, 1}, 4, 0, 2}, {{2, 3, 4, 1, 2}, 2, 1, 1}, {{4, 2}, 3, -1, 0},
    {{5, 6}, 1, 5, 0},       {{0, 150, 1, 0}, 4, 0, 0},
};

template <class T>
class GmmTest : public testing::Test {
 protected:
  static void check(const Case& c, int64_t inner, int64_t columns, bool has_bias, bool is_transposed) {
    std::vector<int64_t> group_of_row;
    for (size_t g = 0; g < c.group_sizes.size(); ++g) {
      group_of_row.insert(group_of_row.end(), static_cast<size_t>(c.group_sizes[g]), static_cast<int64_t>(g));
    }
    const auto used_rows = static_cast<int64_t>(group_of_row.size());
    const int64_t num_rows = used_rows + c.rows_past_the_last_group;
    const auto lhs = Matrix<T>::random(num_rows, inner, 1).poisoned(used_rows, num_rows);
    const int64_t height = is_transposed ? columns : inner;
    const auto rhs = Matrix<T>::random(c.num_matrices * height, is_transposed ? inner : columns, 2);
    const auto bias = Matrix<T>::random(c.num_matrices, columns, 3);

    Gmm<T> arguments{};
    arguments.lhs = lhs.view();
    ConstMatrixStack<T> matrices = stack(rhs, c.num_matrices);
    if (is_transposed) matrices.first = matrices.first.transposed();
    arguments.rhs.weights = matrices;
    if (has_bias) arguments.rhs.bias = bias.view();
    arguments.group_sizes = c.group_sizes.data();
    arguments.num_groups = static_cast<int64_t>(c.group_sizes.size());
    arguments.group_offset = c.group_offset;
    arguments.gemm = &test_gemm<T>();
    const auto out = run_kernel<T>(num_rows, columns, [&](MatrixView<T> view, const Executor& executor) {
      arguments.out = view;
      gmm(arguments, executor);
    });
    const auto want = [&](int64_t r, int64_t f) {
      const int64_t local = r < used_rows ? group_of_row[static_cast<size_t>(r)] - c.group_offset : -1;
      if (local < 0 || local >= c.num_matrices) return 0.0;
      double sum = has_bias ? bias(local, f) : 0.0;
      for (int64_t d = 0; d < inner; ++d) {
        const double factor = is_transposed ? rhs(local * height + f, d) : rhs(local * height + d, f);
        sum += lhs(r, d) * factor;
      }
      return sum;
    };
    expect_near(out, want, 2.0);
  }
};
TYPED_TEST_SUITE(GmmTest, Dtypes, DtypeNames);

TYPED_TEST(GmmTest, MatchesTheLoop) {
  for (size_t i = 0; i < kCases.size(); ++i) {
    for (const int64_t inner : {0, 1, 3, 17, 40}) {
      for (const int64_t columns : {1, 5, 33}) {
        SCOPED_TRACE(testing::Message() << "case " << i << ", D " << inner << ", F " << columns);
        for (const bool has_bias : {false, true}) {
          this->check(kCases[i], inner, columns, has_bias, false);
          if (inner > 0) this->check(kCases[i], inner, columns, has_bias, true);
        }
      }
    }
  }
}

TYPED_TEST(GmmTest, WiderThanOneTaskAndOneBlock) {
  this->check({{2, 131}, 2, 0, 1}, 7, 1031, true, false);
  this->check({{2, 3}, 2, 0, 0}, 521, 9, true, false);
  this->check({{2, 3}, 2, 0, 0}, 521, 9, false, true);
}

}  // namespace
}  // namespace maxmoe
