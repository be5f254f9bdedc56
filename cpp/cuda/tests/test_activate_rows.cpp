// Tests of the CUDA kernel activate_rows: f(gate) * up.
#include "activation_cases.h"
#include "cuda/activation_form.h"

namespace maxmoe {
namespace {

template <class T>
class CudaActivateRowsTest : public testing::Test {};
TYPED_TEST_SUITE(CudaActivateRowsTest, Dtypes, DtypeNames);

TYPED_TEST(CudaActivateRowsTest, MatchesTheLoop) {
  for_every_activation([](const ActivationKind& kind, int64_t columns, int64_t gap) {
    GateAndUp<TypeParam> in(kind.gate, 3, columns, gap);
    const auto out = run_emulated<TypeParam>(3, columns, gap, [&](MatrixView<TypeParam> view) {
      cuda::activate_rows(cuda::ActivateRows<TypeParam>{kind, in.gate().as_const(), in.up().as_const(), view}, nullptr);
    });
    expect_near(
        out, [&](int64_t r, int64_t c) { return naive_activated(kind, in.value(false, r, c), in.value(true, r, c)); });
  });
}

TEST(CudaActivateRowsNan, StaysNan) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  Matrix<float> gate(1, 2);
  Matrix<float> up(1, 2);
  gate.element(0, 0) = up.element(0, 1) = nan;
  gate.element(0, 1) = up.element(0, 0) = 1.0F;
  for (const ActivationKind& kind : activation_kinds()) {
    const auto out = run_emulated<float>(1, 2, 3, [&](MatrixView<float> view) {
      cuda::activate_rows(cuda::ActivateRows<float>{kind, gate.view().as_const(), up.view().as_const(), view}, nullptr);
    });
    EXPECT_TRUE(std::isnan(out(0, 1)));
    EXPECT_EQ(std::isnan(out(0, 0)), kind.gate != GateLayout::none);
  }
}

TYPED_TEST(CudaActivateRowsTest, ErrorsOfApproximationsReachSixteenBitNumbersAlone) {
  const auto gate = Matrix<TypeParam>::random(1, 8, 1, 8);
  const auto up = Matrix<TypeParam>::random(1, 8, 2, 8);
  const ActivationKind kind{Activation::silu, GateLayout::separate, std::numeric_limits<double>::infinity()};
  const auto with_error = [&](double error) {
    cuda::emulator::approximation_error = error;
    Matrix<TypeParam> out(1, 8, 8);
    cuda::activate_rows(cuda::ActivateRows<TypeParam>{kind, gate.view(), up.view(), out.view()}, nullptr);
    cuda::emulator::approximation_error = 0;
    return out;
  };
  EXPECT_EQ(with_error(0) == with_error(1e5), sizeof(TypeParam) > 2);
}

// The distance between `value` and the next number.
template <class T>
double unit_of(double value) {
  constexpr int kDigits = std::is_same_v<T, BFloat16> ? 8 : 11;
  constexpr int kSmallestExponent = std::is_same_v<T, BFloat16> ? -125 : -13;
  int exponent = 0;
  std::frexp(value, &exponent);
  return std::ldexp(1.0, std::max(exponent, kSmallestExponent) - kDigits);
}

// The largest error of an activation or its derivative by approximations, in units of T, over all numbers of T.
template <class T, Activation kActivation>
double largest_error() {
  const ActivationKind kind{kActivation, GateLayout::separate, std::numeric_limits<double>::infinity()};
  using Math = typename cuda::ActivationForm<kActivation, true, true>::template Math<T>;
  double largest = 0.0;
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const float x = widen(T{static_cast<uint16_t>(bits)});
    const auto got = activate<Math, true>(kind, x);
    const auto want = activate<NumberMath<float>, true>(kind, x);
    for (const auto& [a, b] : {std::pair(got.value, want.value), std::pair(got.slope, want.slope)}) {
      if (a == b || (std::isnan(a) && std::isnan(b))) continue;
      const double error = std::abs(double{a} - b) / unit_of<T>(b);
      largest = error <= largest ? largest : error;
    }
  }
  return largest;
}

TYPED_TEST(CudaActivateRowsTest, ApproximationsAreCloserThanHalfAUnitForEveryNumber) {
  if constexpr (sizeof(TypeParam) == 2) {
    for (const double error : {-1.0, 1.0}) {
      cuda::emulator::approximation_error = error;
      EXPECT_LT((largest_error<TypeParam, Activation::silu>()), 0.5);
      EXPECT_LT((largest_error<TypeParam, Activation::swigluoai>()), 0.5);
      EXPECT_LT((largest_error<TypeParam, Activation::gelu>()), 0.5);
      EXPECT_LT((largest_error<TypeParam, Activation::situ>()), 0.5);
    }
    cuda::emulator::approximation_error = 0;
  }
}

}  // namespace
}  // namespace maxmoe
