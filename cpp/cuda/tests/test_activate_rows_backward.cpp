// Tests of the CUDA kernel activate_rows_backward against central differences of float64 loops.
#include "activation_cases.h"

namespace maxmoe {
namespace {

template <class T>
struct Gradients {
  GateAndUp<T> of;
  Matrix<T> activated;
  Matrix<Accumulator<T>> of_weights;
  bool operator==(const Gradients& other) const {
    return of.memory == other.of.memory && of.separate_gate == other.of.separate_gate && activated == other.activated &&
           of_weights == other.of_weights;
  }
};

// The derivative of naive_activated with respect to gate or up.
double slope(const ActivationKind& kind, double gate, double up, bool of_up) {
  constexpr double kStep = 1e-6;
  const double above = naive_activated(kind, gate + (of_up ? 0 : kStep), up + (of_up ? kStep : 0));
  const double below = naive_activated(kind, gate - (of_up ? 0 : kStep), up - (of_up ? kStep : 0));
  return (above - below) / (2 * kStep);
}

template <class T>
class CudaActivateRowsBackwardTest : public testing::Test {
 protected:
  using S = Accumulator<T>;

  static Gradients<T> run(const ActivationKind& kind, const GateAndUp<T>& in, const Matrix<T>& grad,
                          const Matrix<S>* weights, bool wants_all, int64_t gap) {
    return in_every_schedule([&] {
      Gradients<T> out{in, Matrix<T>(grad.rows(), grad.columns(), gap), Matrix<S>(1, grad.rows())};
      cuda::activate_rows_backward(
          cuda::ActivateRowsBackward<T>{kind, grad.view(), weights ? weights->view().data : nullptr, out.of.gate(),
                                        out.of.up(), wants_all ? out.activated.view() : MatrixView<T>{},
                                        wants_all ? out.of_weights.view().data : nullptr},
          nullptr);
      EXPECT_TRUE(out.of.memory.gap_is_intact() && out.of.separate_gate.gap_is_intact() &&
                  out.activated.gap_is_intact());
      return out;
    });
  }

  static void check(const ActivationKind& kind, int64_t columns, int64_t gap, bool is_weighted) {
    GateAndUp<T> in(kind.gate, 3, columns, gap);
    const auto grad = Matrix<T>::random(3, columns, 1, gap);
    const auto weights = Matrix<S>::random(1, 3, 2);
    Gradients<T> got = run(kind, in, grad, is_weighted ? &weights : nullptr, true, gap);
    const double slack = std::is_same_v<T, double> ? 1e5 : 2.0;  // the differences have errors of 1e-9
    for (int64_t r = 0; r < 3; ++r) {
      const double weight = is_weighted ? weights(0, r) : 1.0;
      double product = 0.0;
      for (int64_t c = 0; c < columns; ++c) {
        const double gate = in.value(false, r, c);
        const double up = in.value(true, r, c);
        const double value = naive_activated(kind, gate, up);
        product += value * grad(r, c);
        ASSERT_NEAR(got.activated(r, c), weight * value, 2 * tolerance<T>());
        const double allowed = slack * tolerance<T>();
        ASSERT_NEAR(got.of.value(true, r, c), weight * grad(r, c) * slope(kind, gate, up, true), allowed);
        if (kind.gate == GateLayout::none) continue;
        ASSERT_NEAR(got.of.value(false, r, c), weight * grad(r, c) * slope(kind, gate, up, false), allowed);
      }
      ASSERT_NEAR(got.of_weights(0, r), product, 4 * tolerance<S>() * std::max(1.0, std::abs(product)));
    }
    const Gradients<T> less = run(kind, in, grad, is_weighted ? &weights : nullptr, false, gap);
    EXPECT_EQ(less.of.memory, got.of.memory);
    EXPECT_EQ(less.of.separate_gate, got.of.separate_gate);
    EXPECT_EQ(less.of_weights, Matrix<S>(1, 3));
  }
};
TYPED_TEST_SUITE(CudaActivateRowsBackwardTest, Dtypes, DtypeNames);

TYPED_TEST(CudaActivateRowsBackwardTest, MatchesDifferences) {
  for_every_activation([](const ActivationKind& kind, int64_t columns, int64_t gap) {
    TestFixture::check(kind, columns, gap, /*is_weighted=*/columns != 8);
  });
}

TYPED_TEST(CudaActivateRowsBackwardTest, ActivatedRowsMayOverwriteTheGradient) {
  const ActivationKind kind{Activation::silu, GateLayout::separate, std::numeric_limits<double>::infinity()};
  for (const int64_t columns : {8, 33, 264}) {
    const GateAndUp<TypeParam> in(kind.gate, 3, columns, 8);
    const auto grad = Matrix<TypeParam>::random(3, columns, 1, 8);
    const auto weights = Matrix<Accumulator<TypeParam>>::random(1, 3, 2);
    const auto apart = TestFixture::run(kind, in, grad, &weights, true, 8);
    const auto got = in_every_schedule([&] {
      Gradients<TypeParam> out{in, grad, Matrix<Accumulator<TypeParam>>(1, 3)};
      cuda::activate_rows_backward<TypeParam>(
          {kind, out.activated.view().as_const(), weights.view().data, out.of.gate(), out.of.up(), out.activated.view(),
           out.of_weights.view().data},
          nullptr);
      return out;
    });
    EXPECT_TRUE(got == apart);
  }
}

// The gradient is 0 past the limit.
TEST(CudaActivateRowsBackwardLimit, ClippedNumbersHaveNoGradient) {
  const ActivationKind kind{Activation::swigluoai, GateLayout::separate, 1.0};
  Matrix<float> gate(1, 4);
  Matrix<float> up(1, 4);
  Matrix<float> grad(1, 4);
  grad.fill(1.0);
  const float gates[] = {2.0F, 0.5F, -9.0F, 0.5F};
  const float ups[] = {0.5F, 2.0F, 0.5F, -2.0F};
  for (int64_t c = 0; c < 4; ++c) {
    gate.element(0, c) = gates[c];
    up.element(0, c) = ups[c];
  }
  cuda::activate_rows_backward(
      cuda::ActivateRowsBackward<float>{kind, grad.view().as_const(), nullptr, gate.view(), up.view(), {}, nullptr},
      nullptr);
  EXPECT_EQ(gate(0, 0), 0.0);
  EXPECT_NE(gate(0, 2), 0.0);
  EXPECT_EQ(up(0, 1), 0.0);
  EXPECT_EQ(up(0, 3), 0.0);
  EXPECT_NE(up(0, 0), 0.0);
}

}  // namespace
}  // namespace maxmoe
