// Tests of the CUDA kernel ragged_scatter_add: rows that are added to the rows of an index.
#include "emulated.h"

namespace maxmoe {
namespace {

template <class T>
Matrix<T> run(const Matrix<T>& rows, const std::vector<int64_t>& index, int64_t group_size, int64_t num_rows,
              const Accumulator<T>* weights, int64_t gap) {
  const auto size = static_cast<int64_t>(index.size());
  return run_emulated<T>(num_rows, rows.columns(), gap, [&](MatrixView<T> view) {
    std::vector<int64_t> scratch(static_cast<size_t>(cuda::ragged_scatter_add_scratch(size, num_rows)), -9);
    cuda::ragged_scatter_add(
        RaggedScatterAdd<T>{rows.view(), index.data(), size, group_size, weights, scratch.data(), view}, nullptr);
  });
}

template <class T>
class CudaRaggedScatterAddTest : public testing::Test {
 protected:
  static void check(const Matrix<T>& rows, const std::vector<int64_t>& index, int64_t group_size, int64_t num_rows,
                    int64_t gap, bool is_weighted) {
    const auto weights = Matrix<Accumulator<T>>::random(1, static_cast<int64_t>(index.size()), 2);
    const auto out = run<T>(rows, index, group_size, num_rows, is_weighted ? weights.view().data : nullptr, gap);
    expect_near(out, [&](int64_t n, int64_t c) {
      double sum = 0.0;
      for (size_t j = 0; j < index.size(); ++j) {
        const auto slot = static_cast<int64_t>(j);
        if (index[j] == n) sum += (is_weighted ? weights(0, slot) : 1.0) * rows(slot / group_size, c);
      }
      return sum;
    });
  }
};
TYPED_TEST_SUITE(CudaRaggedScatterAddTest, Dtypes, DtypeNames);

TYPED_TEST(CudaRaggedScatterAddTest, MatchesTheLoop) {
  for (const int64_t gap : kGaps) {
    for (const int64_t columns : kEmulatedColumns) {
      for (const int64_t group_size : {1, 5}) {
        SCOPED_TRACE(testing::Message() << columns << " columns, groups of " << group_size << ", gap " << gap);
        const auto rows = Matrix<TypeParam>::random(13, columns, 1, gap);
        this->check(rows, random_index(13 * group_size, 11, 3), group_size, 11, gap, group_size > 1);
      }
    }
  }
}

// More slots than a chunk of the plan has, and more rows than slots.
TYPED_TEST(CudaRaggedScatterAddTest, ManySlotsOrManyRows) {
  const auto rows = Matrix<TypeParam>::random(700, 3, 1);
  this->check(rows, random_index(700, 5, 3), 1, 5, 3, true);
  this->check(rows, std::vector<int64_t>(700, 1), 1, 2, 3, false);
  this->check(Matrix<TypeParam>::random(3, 3, 1), {2000, -1, 7}, 1, 2001, 3, false);
}

TYPED_TEST(CudaRaggedScatterAddTest, NothingToAdd) {
  this->check(Matrix<TypeParam>(0, 8), {}, 1, 3, 8, false);
  this->check(Matrix<TypeParam>::random(2, 8, 1).poisoned(0, 2), {-1, -1}, 1, 3, 8, false);
  this->check(Matrix<TypeParam>::random(2, 8, 1), {-1, -1}, 1, 0, 8, false);
}

// The sum is rounded once, in the order of the index: float32 sums of 16-bit numbers.
TEST(CudaRaggedScatterAddOrder, SumsAreFloat32InTheOrderOfTheIndex) {
  Matrix<BFloat16> rows(3, 8, 8);
  for (int64_t c = 0; c < 8; ++c) {
    rows.element(0, c) = narrow<BFloat16>(256.0F);
    rows.element(1, c) = narrow<BFloat16>(1.0F);
    rows.element(2, c) = narrow<BFloat16>(-256.0F);
  }
  const auto out = run<BFloat16>(rows, {0, 0, 0}, 1, 1, nullptr, 8);
  for (int64_t c = 0; c < 8; ++c) EXPECT_EQ(out(0, c), 1.0);
}

TEST(CudaRaggedScatterAddOrder, FirstSlotsAreAddedFirst) {
  Matrix<float> rows(300, 1);
  for (int64_t r = 0; r < 300; ++r) rows.element(r, 0) = r == 0 ? 16777216.0F : 1.0F;  // which loses each 1
  const auto out = run<float>(rows, std::vector<int64_t>(300, 0), 1, 1, nullptr, 3);
  EXPECT_EQ(out(0, 0), 16777216.0);
}

TEST(CudaRaggedScatterAddErrors, NameOperatorAndArgument) {
  const auto rows = Matrix<float>::random(2, 8, 1);
  for (const int64_t wrong : {-2, 5}) {
    const std::string error = error_of([&] { run<float>(rows, {0, wrong}, 1, 5, nullptr, 8); });
    EXPECT_EQ(error, "maxmoe::ragged_scatter_add: a value of index is out of range (-1 or a row of the result)");
  }
}

}  // namespace
}  // namespace maxmoe
