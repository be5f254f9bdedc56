// Tests of the CUDA kernel ragged_gather_reduce: weighted sums of rows.
#include <memory>

#include "emulated.h"

namespace maxmoe {
namespace {

template <class T>
class CudaRaggedGatherReduceTest : public testing::Test {
 protected:
  using Weights = Matrix<Accumulator<T>>;

  static void check(const Matrix<T>& rows, const std::vector<int64_t>& index, int64_t group_size,
                    const Weights* weights, const bool* valid, int64_t gap) {
    const auto groups = static_cast<int64_t>(index.size()) / group_size;
    const auto out = run_emulated<T>(groups, rows.columns(), gap, [&](MatrixView<T> view) {
      cuda::ragged_gather_reduce(RaggedGatherReduce<T>{rows.view(), index.data(), group_size,
                                                       weights ? weights->view().data : nullptr, valid, view},
                                 nullptr);
    });
    const auto want = [&](int64_t t, int64_t c) {
      double sum = 0.0;
      for (int64_t j = t * group_size; j < (t + 1) * group_size; ++j) {
        const int64_t row = index[static_cast<size_t>(j)];
        if (row < 0 || (valid != nullptr && !valid[j])) continue;
        sum += (weights ? (*weights)(0, j) : 1.0) * rows(row, c);
      }
      return sum;
    };
    expect_near(out, want);
  }
};
TYPED_TEST_SUITE(CudaRaggedGatherReduceTest, Dtypes, DtypeNames);

TYPED_TEST(CudaRaggedGatherReduceTest, MatchesTheLoop) {
  for (const int64_t gap : kGaps) {
    for (const int64_t columns : kEmulatedColumns) {
      for (const int64_t group_size : {1, 5, 8}) {
        SCOPED_TRACE(testing::Message() << columns << " columns, groups of " << group_size << ", gap " << gap);
        const auto rows = Matrix<TypeParam>::random(13, columns, 1, gap);
        const int64_t size = 9 * group_size;
        const auto weights = Matrix<Accumulator<TypeParam>>::random(1, size, 2);
        const std::vector<int64_t> index = random_index(size, rows.rows(), 3);
        const auto valid = std::make_unique<bool[]>(static_cast<size_t>(size));
        for (int64_t j = 0; j < size; ++j) valid[static_cast<size_t>(j)] = j % 3 != 1;
        this->check(rows, index, group_size, nullptr, nullptr, gap);
        this->check(rows, index, group_size, &weights, valid.get(), gap);
      }
    }
  }
}

TYPED_TEST(CudaRaggedGatherReduceTest, SumsOfTwoMatricesMatchTheLoop) {
  for (const int64_t gap : kGaps) {
    const auto rows = Matrix<TypeParam>::random(13, 40, 1, gap);
    const auto others = Matrix<TypeParam>::random(13, 40, 4, gap);
    const auto weights = Matrix<Accumulator<TypeParam>>::random(1, 15, 2);
    const std::vector<int64_t> index = random_index(15, 13, 3);
    for (const Accumulator<TypeParam>* const factors : {weights.view().data, decltype(weights.view().data){nullptr}}) {
      const auto out = run_emulated<TypeParam>(5, 40, gap, [&](MatrixView<TypeParam> view) {
        const RaggedGatherReduce<TypeParam> sums{rows.view(), index.data(), 3, factors, nullptr, view};
        cuda::ragged_gather_reduce_of_two<TypeParam>({sums, others.view()}, nullptr);
      });
      expect_near(out, [&](int64_t t, int64_t c) {
        double sum = 0.0;
        for (int64_t j = 3 * t; j < 3 * t + 3; ++j) {
          const int64_t row = index[static_cast<size_t>(j)];
          if (row >= 0) sum += (factors != nullptr ? factors[j] : 1.0) * (rows(row, c) + others(row, c));
        }
        return sum;
      });
    }
  }
}

TYPED_TEST(CudaRaggedGatherReduceTest, RowsInNoSumAreNotRead) {
  const auto rows = Matrix<TypeParam>::random(5, 9, 1).poisoned(1, 3);
  const std::unique_ptr<bool[]> valid(new bool[4]{true, true, false, true});
  this->check(rows, {0, -1, 1, 3}, 2, nullptr, valid.get(), 3);
  this->check(Matrix<TypeParam>(0, 3), {-1, -1}, 2, nullptr, nullptr, 3);
}

// The sum is rounded once, in the order of the index: float32 sums of 16-bit numbers.
TEST(CudaRaggedGatherReduceOrder, SumsAreFloat32InTheOrderOfTheIndex) {
  Matrix<BFloat16> rows(3, 8, 8);
  for (int64_t c = 0; c < 8; ++c) {
    rows.element(0, c) = narrow<BFloat16>(256.0F);
    rows.element(1, c) = narrow<BFloat16>(1.0F);
    rows.element(2, c) = narrow<BFloat16>(-256.0F);
  }
  const std::vector<int64_t> index = {0, 1, 2};
  const auto out = run_emulated<BFloat16>(1, 8, 8, [&](MatrixView<BFloat16> view) {
    const ConstMatrixView<BFloat16> source = rows.view().as_const();
    cuda::ragged_gather_reduce(RaggedGatherReduce<BFloat16>{source, index.data(), 3, nullptr, nullptr, view}, nullptr);
  });
  for (int64_t c = 0; c < 8; ++c) EXPECT_EQ(out(0, c), 1.0);
}

TEST(CudaRaggedGatherReduceErrors, NameOperatorAndArgument) {
  const auto rows = Matrix<float>::random(5, 8, 1);
  Matrix<float> out(1, 8);
  for (const int64_t wrong : {-2, 5}) {
    const std::vector<int64_t> index = {0, wrong, 1};
    const std::string error = error_of([&] {
      cuda::ragged_gather_reduce(RaggedGatherReduce<float>{rows.view(), index.data(), 3, nullptr, nullptr, out.view()},
                                 nullptr);
    });
    EXPECT_EQ(error, "maxmoe::ragged_gather_reduce: a value of index is out of range (-1 or a row of rows)");
  }
}

}  // namespace
}  // namespace maxmoe
