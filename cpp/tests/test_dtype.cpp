// Conversions of the 16-bit types against Eigen's: of single values, and inside ragged_gather and tile_gemm, which
// convert in vectors.
#include <gtest/gtest.h>

#include <Eigen/Core>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "kernels/product/tiled/tile_gemm.h"
#include "kernels/rows/ragged_gather.h"
#include "matrix.h"

namespace maxmoe {
namespace {

template <class T>
using EigenType = std::conditional_t<std::is_same_v<T, BFloat16>, Eigen::bfloat16, Eigen::half>;

template <class T>
float eigen_widen(uint16_t bits) {
  return static_cast<float>(std::bit_cast<EigenType<T>>(bits));
}
template <class T>
uint16_t eigen_narrow(float value) {
  return std::bit_cast<uint16_t>(EigenType<T>(value));
}

// Expects equal bits, or NaN for NaN.
void expect_same(float got, float want, uint16_t bits) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got)) << bits;
  } else {
    EXPECT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want)) << bits;
  }
}

template <class T>
class Dtype : public testing::Test {};
using HalfTypes = testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(Dtype, HalfTypes, DtypeNames);

TYPED_TEST(Dtype, WidensEveryValue) {
  constexpr int64_t kCount = 65536;
  Matrix<TypeParam> source(1, kCount);
  for (int64_t i = 0; i < kCount; ++i) source.element(0, i) = {static_cast<uint16_t>(i)};
  const int64_t first = 0;
  const float one = 1.0F;
  Matrix<TypeParam> row(1, kCount);
  ragged_gather(RaggedGather<TypeParam>{source.view().as_const(), &first, &one, 0, 1, row.view()}, SerialExecutor());
  Matrix<TypeParam> identity(1, 1);
  identity.fill(1.0);
  Matrix<TypeParam> product(1, kCount);
  KernelGemm<TypeParam>().multiply(identity.view().as_const(), {source.view().as_const(), product.view(), false});
  for (int64_t i = 0; i < kCount; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    const float want = eigen_widen<TypeParam>(bits);
    expect_same(widen(TypeParam{bits}), want, bits);
    expect_same(widen(row.element(0, i)), want, bits);
    // 0 + -0 is +0, and products of bfloat16 pairs may treat subnormals as zero.
    const bool may_be_zero = std::is_same_v<TypeParam, BFloat16> && std::fpclassify(want) == FP_SUBNORMAL;
    const float multiplied = widen(product.element(0, i));
    if (!(may_be_zero && multiplied == 0.0F)) expect_same(multiplied, want == 0.0F ? 0.0F : want, bits);
  }
}

// Floats around every 16-bit value: the value, the midpoint to the next one, and the neighbours of both. Then random
// bits.
template <class T>
std::vector<float> interesting_floats() {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::vector<float> values = {1e38F, -1e38F, 1e-45F, std::numeric_limits<float>::quiet_NaN(), -kInfinity};
  for (uint32_t bits = 0; bits < 65536; ++bits) {
    const float value = eigen_widen<T>(static_cast<uint16_t>(bits));
    const float next = eigen_widen<T>(static_cast<uint16_t>(bits + 1));
    const float half_way = static_cast<float>((static_cast<double>(value) + next) / 2);
    for (const float v : {value, half_way}) {
      values.insert(values.end(), {v, std::nextafter(v, kInfinity), std::nextafter(v, -kInfinity)});
    }
  }
  std::mt19937 generator(1);
  for (int i = 0; i < 100000; ++i) values.push_back(std::bit_cast<float>(static_cast<uint32_t>(generator())));
  return values;
}

TYPED_TEST(Dtype, NarrowsToTheNearestWithTiesToEven) {
  const std::vector<float> values = interesting_floats<TypeParam>();
  const auto count = static_cast<int64_t>(values.size());
  constexpr int64_t kColumns = 33;  // two of the widest vectors and one more
  Matrix<TypeParam> ones(1, kColumns);
  ones.fill(1.0);
  const std::vector<int64_t> index(values.size(), 0);
  Matrix<TypeParam> rows(count, kColumns);
  ragged_gather(RaggedGather<TypeParam>{ones.view().as_const(), index.data(), values.data(), 0, count, rows.view()},
                SerialExecutor());
  for (int64_t i = 0; i < count; ++i) {
    const float value = values[static_cast<size_t>(i)];
    const TypeParam one = narrow<TypeParam>(value);
    for (int64_t c = 0; c < kColumns; ++c) {
      if (std::isnan(value)) {
        ASSERT_TRUE(std::isnan(widen(one)) && std::isnan(widen(rows.element(i, c))));
      } else {
        ASSERT_EQ(one.bits, eigen_narrow<TypeParam>(value)) << value;
        ASSERT_EQ(rows.element(i, c).bits, one.bits) << value;
      }
    }
  }
}

}  // namespace
}  // namespace maxmoe
