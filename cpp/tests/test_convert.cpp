// The 16-bit types against Eigen's, and the conversion of matrices.
#include <gtest/gtest.h>

#include <Eigen/Core>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

#include "kernels/convert.h"
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

// Two conversions agree: the same bits, or NaN both.
void expect_same(float got, float want, uint16_t bits) {
  if (std::isnan(want)) {
    EXPECT_TRUE(std::isnan(got)) << bits;
  } else {
    EXPECT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want)) << bits;
  }
}

template <class T>
class Convert : public testing::Test {};
using HalfTypes = testing::Types<BFloat16, Float16>;
TYPED_TEST_SUITE(Convert, HalfTypes, DtypeNames);

TYPED_TEST(Convert, WidensEveryValue) {
  constexpr int64_t kCount = 65536;
  Matrix<TypeParam> source(1, kCount);
  for (int64_t i = 0; i < kCount; ++i) source.element(0, i) = {static_cast<uint16_t>(i)};
  Matrix<float> target(1, kCount);
  widen_matrix(Widen<TypeParam>{source.view().as_const(), target.view()}, SerialExecutor());
  for (int64_t i = 0; i < kCount; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    expect_same(target.element(0, i), eigen_widen<TypeParam>(bits), bits);
    expect_same(widen(TypeParam{bits}), eigen_widen<TypeParam>(bits), bits);
  }
}

// Floats around every 16-bit value: it, its neighbours, halfway to the next one and beside that; and any bits at all.
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

TYPED_TEST(Convert, NarrowsToTheNearestWithTiesToEven) {
  const std::vector<float> values = interesting_floats<TypeParam>();
  const auto count = static_cast<int64_t>(values.size());
  Matrix<TypeParam> target(1, count);
  const ConstMatrixView<float> source{values.data(), 1, count, count};
  narrow_matrix(Narrow<TypeParam>{source, target.view()}, SerialExecutor());
  for (int64_t i = 0; i < count; ++i) {
    const float value = values[static_cast<size_t>(i)];
    const TypeParam one = narrow<TypeParam>(value);
    if (std::isnan(value)) {
      EXPECT_TRUE(std::isnan(widen(one)) && std::isnan(widen(target.element(0, i))));
    } else {
      ASSERT_EQ(one.bits, eigen_narrow<TypeParam>(value)) << value;
      ASSERT_EQ(target.element(0, i).bits, one.bits) << value;
    }
  }
}

TYPED_TEST(Convert, MatricesOfAnyShapeAndTransposed) {
  for (const int64_t rows : {0, 1, 3, 17, 130}) {
    for (const int64_t columns : {0, 1, 7, 8, 9, 31, 257}) {
      const auto source = Matrix<TypeParam>::random(rows, columns, 1);
      const auto plain = run_kernel<float>(rows, columns, [&](MatrixView<float> out, const Executor& executor) {
        widen_matrix(Widen<TypeParam>{source.view(), out}, executor);
      });
      expect_near(plain, source, 0.0);
      const auto transposed = run_kernel<float>(rows, columns, [&](MatrixView<float> out, const Executor& executor) {
        widen_matrix(Widen<TypeParam>{source.view().transposed(), out.transposed()}, executor);
      });
      expect_near(transposed, source, 0.0);
      const auto back = run_kernel<TypeParam>(rows, columns, [&](MatrixView<TypeParam> out, const Executor& executor) {
        narrow_matrix(Narrow<TypeParam>{plain.view(), out}, executor);
      });
      expect_near(back, source, 0.0);
    }
  }
}

}  // namespace
}  // namespace maxmoe
