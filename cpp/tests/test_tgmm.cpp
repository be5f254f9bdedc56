// Tests of tgmm: out[l] = lhs_g^T * rhs_g over the rows of group g = l + group_offset.
#include "kernels/experts/tgmm.h"

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
};

const std::vector<Case> kCases = {
    {{}, 2, 0},      {{0, 0}, 2, 0}, {{1}, 1, 0}, {{3, 0, 5, 1}, 4, 0}, {{2, 3, 4, 1, 2}, 2, 1},
    {{4, 2}, 3, -1}, {{5}, 2, 4},
};

template <class T>
class TgmmTest : public testing::Test {
 protected:
  static void check(const Case& c, int64_t left, int64_t right) {
    int64_t used_rows = 0;
    std::vector<int64_t> first_row = {0};
    for (const int64_t size : c.group_sizes) first_row.push_back(used_rows += size);
    const auto lhs = Matrix<T>::random(used_rows + 2, left, 1).poisoned(used_rows, used_rows + 2);
    const auto rhs = Matrix<T>::random(used_rows + 2, right, 2).poisoned(used_rows, used_rows + 2);

    const auto out = run_kernel<T>(c.num_matrices * left, right, [&](MatrixView<T> view, const Executor& executor) {
      const MatrixStack<T> stacked{view.row_range(0, left), c.num_matrices, left * view.row_stride};
      const auto num_groups = static_cast<int64_t>(c.group_sizes.size());
      tgmm(Tgmm<T>{lhs.view(), rhs.view(), c.group_sizes.data(), num_groups, c.group_offset, &test_gemm<T>(), stacked},
           executor);
    });
    const auto want = [&](int64_t row, int64_t f) {
      const int64_t group = row / left + c.group_offset;
      if (group < 0 || group >= static_cast<int64_t>(c.group_sizes.size())) return 0.0;
      double sum = 0.0;
      for (int64_t r = first_row[static_cast<size_t>(group)]; r < first_row[static_cast<size_t>(group) + 1]; ++r) {
        sum += lhs(r, row % left) * rhs(r, f);
      }
      return sum;
    };
    expect_near(out, want, 2.0);
  }
};
TYPED_TEST_SUITE(TgmmTest, Dtypes, DtypeNames);

TYPED_TEST(TgmmTest, MatchesTheLoop) {
  for (size_t i = 0; i < kCases.size(); ++i) {
    for (const int64_t left : {1, 3, 17, 40}) {
      for (const int64_t right : {1, 5, 33}) {
        SCOPED_TRACE(testing::Message() << "case " << i << ", D " << left << ", F " << right);
        this->check(kCases[i], left, right);
      }
    }
  }
}

TYPED_TEST(TgmmTest, HigherThanOneTask) {
  this->check({{3, 40, 0}, 3, 0}, 259, 7);
}

}  // namespace
}  // namespace maxmoe
