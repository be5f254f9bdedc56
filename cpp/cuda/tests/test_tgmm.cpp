// Tests of the CUDA kernel tgmm against plain loops.
#include "emulated.h"

namespace maxmoe {
namespace {

struct TgmmCase {
  std::vector<int64_t> group_sizes;
  int64_t num_matrices;  // L
  int64_t group_offset;
  int64_t left;   // D
  int64_t right;  // F
};

template <class T>
class CudaTgmmTest : public testing::Test {
 protected:
  static void check(const TgmmCase& c, int64_t gap) {
    SCOPED_TRACE(testing::Message() << c.left << " x " << c.right << ", " << c.num_matrices << " matrices, gap "
                                    << gap);
    std::vector<int64_t> first_row = {0};
    for (const int64_t size : c.group_sizes) first_row.push_back(first_row.back() + size);
    const int64_t used_rows = first_row.back();
    const auto lhs = Matrix<T>::random(used_rows + 2, c.left, 1, gap).poisoned(used_rows, used_rows + 2);
    const auto rhs = Matrix<T>::random(used_rows + 2, c.right, 2, gap).poisoned(used_rows, used_rows + 2);
    const auto num_groups = static_cast<int64_t>(c.group_sizes.size());
    const auto out = run_emulated<T>(c.num_matrices * c.left, c.right, gap, [&](MatrixView<T> view) {
      const MatrixStack<T> matrices{view.row_range(0, c.left), c.num_matrices, c.left * view.row_stride};
      cuda::tgmm(cuda::Tgmm<T>{lhs.view(), rhs.view(), c.group_sizes.data(), num_groups, c.group_offset, matrices},
                 nullptr);
    });
    const auto want = [&](int64_t row, int64_t f) {
      const int64_t group = row / c.left + c.group_offset;
      if (group < 0 || group >= num_groups) return 0.0;
      double sum = 0.0;
      for (int64_t r = first_row[static_cast<size_t>(group)]; r < first_row[static_cast<size_t>(group) + 1]; ++r) {
        sum += lhs(r, row % c.left) * rhs(r, f);
      }
      return sum;
    };
    expect_near(out, want, 4.0);
  }
};
TYPED_TEST_SUITE(CudaTgmmTest, Dtypes, DtypeNames);

TYPED_TEST(CudaTgmmTest, MatchesTheLoop) {
  this->check({{70, 0, 1, 130}, 4, 0, 72, 136}, 8);
  this->check({{70, 0, 1, 130}, 4, 0, 140, 24}, 3);
  this->check({{3, 7, 0, 20, 9}, 3, 1, 40, 24}, 8);
  this->check({{3, 7, 0, 20, 9}, 3, 1, 40, 21}, 8);
  this->check({{3, 7, 0, 40, 9}, 3, 2, 7, 9}, 3);
}

// Matrices of groups before the first and after the last one are zero.
TYPED_TEST(CudaTgmmTest, GroupsThatAreNotThere) {
  this->check({{4, 2}, 4, -1, 8, 8}, 8);
  this->check({{5}, 2, 1, 8, 8}, 8);
  this->check({{}, 2, 0, 8, 8}, 8);
  this->check({{0, 0}, 2, 0, 8, 8}, 8);
}

TYPED_TEST(CudaTgmmTest, NothingToMultiply) {
  this->check({{2, 3}, 2, 0, 0, 8}, 8);
  this->check({{2, 3}, 2, 0, 8, 0}, 8);
  this->check({{2, 3}, 0, 0, 8, 8}, 8);
}

TEST(CudaTgmmErrors, NameOperatorAndArgument) {
  const auto rows = Matrix<float>::random(4, 8, 1);
  Matrix<float> out(16, 8);
  const auto error = [&](std::vector<int64_t> group_sizes) {
    return error_of([&] {
      cuda::tgmm(cuda::Tgmm<float>{rows.view(), rows.view(), group_sizes.data(), 2, 0, stack(out, 2)}, nullptr);
    });
  };
  EXPECT_EQ(error({2, 2}), "");
  EXPECT_EQ(error({2, 3}), "maxmoe::tgmm: group_sizes does not fit the rows");
  EXPECT_EQ(error({-1, 3}), "maxmoe::tgmm: group_sizes does not fit the rows");
}

}  // namespace
}  // namespace maxmoe
