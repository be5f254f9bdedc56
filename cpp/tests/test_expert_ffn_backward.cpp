// Tests of the backward pass of the fused experts: gradients against float64, against differences in random directions,
// and gradients of low-rank factors against the gradients of the merged matrices.
#include <gtest/gtest.h>

#include <cmath>

#include "ffn_runs.h"
#include "kernels/experts/expert_ffn.h"

namespace maxmoe {
namespace {

double dot(const Matrix<double>& a, const Matrix<double>& b) {
  double sum = 0.0;
  for (int64_t r = 0; r < a.rows(); ++r) {
    for (int64_t c = 0; c < a.columns(); ++c) sum += a(r, c) * b(r, c);
  }
  return sum;
}

// Calls check(name, get) for every tensor that has a gradient in the variant; get(tensors) returns that tensor.
template <class Check>
void for_every_gradient(const Variant& variant, const Check& check) {
  check("x", [](auto& t) -> auto& { return t.x; });
  check("up", [](auto& t) -> auto& { return t.up; });
  check("down", [](auto& t) -> auto& { return t.down; });
  if (variant.weighted) check("weights", [](auto& t) -> auto& { return t.weights; });
  if (variant.is_gated()) check("gate", [](auto& t) -> auto& { return t.gate; });
  if (!variant.biased) return;
  check("up_bias", [](auto& t) -> auto& { return t.up_bias; });
  check("down_bias", [](auto& t) -> auto& { return t.down_bias; });
  if (variant.is_gated()) check("gate_bias", [](auto& t) -> auto& { return t.gate_bias; });
}

// Calls check(name, get) for the factors of gate, up and down.
template <class Check>
void for_every_factor(const Check& check) {
  check("gate a", [](auto& f) -> auto& { return f.gate.a; });
  check("gate b", [](auto& f) -> auto& { return f.gate.b; });
  check("up a", [](auto& f) -> auto& { return f.up.a; });
  check("up b", [](auto& f) -> auto& { return f.up.b; });
  check("down a", [](auto& f) -> auto& { return f.down.a; });
  check("down b", [](auto& f) -> auto& { return f.down.b; });
}

// The gradients of the tensors, without factors.
template <class T>
FfnTensors<T> gradients(const FfnShape& shape, const Variant& variant, const FfnTensors<T>& tensors,
                        const Matrix<T>& preactivations, const Matrix<T>& grad_out) {
  return FfnBackward<T>(shape, variant, tensors, preactivations, grad_out, SerialExecutor()).run().tensors;
}

// Compares gradients of type T with gradients in float64, up to the rounding of T.
template <class T>
void expect_near_gradients(const Variant& variant, const FfnTensors<T>& got, const FfnTensors<double>& want) {
  for_every_gradient(variant, [&](const char* name, const auto& get) {
    SCOPED_TRACE(name);
    expect_near(Matrix<double>(get(got)), get(want), 24.0 * tolerance<T>() / tolerance<double>());
  });
}

template <class T>
void expect_near_factors(const FfnFactors<T>& got, const FfnFactors<double>& want) {
  for_every_factor([&](const char* name, const auto& get) {
    SCOPED_TRACE(name);
    const Factor<double>& factor = get(want);
    Matrix<double> values(factor.memory().rows(), factor.memory().columns());
    for (int64_t r = 0; r < values.rows(); ++r) {
      for (int64_t c = 0; c < values.columns(); ++c) {
        values.element(r, c) = get(got)(r / factor.rows(), r % factor.rows(), c);
      }
    }
    expect_near(values, factor.memory(), 24.0 * tolerance<T>() / tolerance<double>());
    EXPECT_TRUE(get(got).memory().gap_is_intact());
  });
}

template <class T>
class ExpertFfnBackwardTest : public testing::Test {};
TYPED_TEST_SUITE(ExpertFfnBackwardTest, Dtypes, DtypeNames);

TYPED_TEST(ExpertFfnBackwardTest, GradientsDoNotDependOnTheNumberOfThreads) {
  const FfnShape shape{random_routing(150, 2, 3, 1), 131, 35};
  const Variant variant = variants()[1];
  const auto factors = FfnFactors<TypeParam>::random(shape, variant.kind.gate, {2, 3, 4, false, true}, 50);
  const auto tensors = FfnTensors<TypeParam>::random(shape, 1);
  const auto grad_out = Matrix<TypeParam>::random(150, 131, 9);
  const auto forward = run_forward(shape, variant, tensors, factors);
  const auto run = [&](const Executor& executor) {
    return FfnBackward<TypeParam>(shape, variant, tensors, forward.preactivations, grad_out, executor, factors,
                                  forward.reduced)
        .run();
  };
  const auto serial = run(SerialExecutor());
  const auto threaded = run(ThreadExecutor(4));
  for_every_gradient(variant, [&](const char* name, const auto& get) {
    EXPECT_TRUE(get(serial.tensors).has_same_bits(get(threaded.tensors))) << name;
    EXPECT_TRUE(get(serial.tensors).gap_is_intact()) << name;
  });
  for_every_factor([&](const char* name, const auto& get) {
    EXPECT_TRUE(get(serial.factors).memory().has_same_bits(get(threaded.factors).memory())) << name;
    EXPECT_TRUE(get(serial.factors).memory().gap_is_intact()) << name;
  });
}

// Compares with the gradients of float64 up to the rounding of the type. Both get the same preactivations, because
// rounding could move one across the kink of a clip.
TYPED_TEST(ExpertFfnBackwardTest, GradientsAreThoseOfFloat64) {
  for_every_case([](const FfnShape& shape, const Variant& variant) {
    const auto tensors = FfnTensors<TypeParam>::random(shape, 1);
    const auto grad_out = Matrix<TypeParam>::random(shape.routing.num_tokens, shape.hidden_size, 9);
    const auto z = run_forward(shape, variant, tensors).preactivations;
    const auto got = gradients(shape, variant, tensors, z, grad_out);
    const auto want =
        gradients(shape, variant, FfnTensors<double>(tensors), Matrix<double>(z), Matrix<double>(grad_out));
    expect_near_gradients<TypeParam>(variant, got, want);
  });
}

// The gradients of the factors follow from the gradients of the merged matrices W + reduce * expand, which the same
// kernels compute without factors. All other gradients equal the gradients with the merged matrices.
TYPED_TEST(ExpertFfnBackwardTest, GradientsOfLowRankFactorsFollowFromThoseOfMergedMatrices) {
  for_every_low_rank_case([](const FfnShape& shape, const Variant& variant, const FactorShape& ranks) {
    const GateLayout layout = variant.kind.gate;
    const auto tensors = FfnTensors<TypeParam>::random(shape, 1);
    const auto factors = FfnFactors<TypeParam>::random(shape, layout, ranks, 50);
    const auto grad_out = Matrix<TypeParam>::random(shape.routing.num_tokens, shape.hidden_size, 9);
    const auto forward = run_forward(shape, variant, tensors, factors);
    const auto got = FfnBackward<TypeParam>(shape, variant, tensors, forward.preactivations, grad_out, SerialExecutor(),
                                            factors, forward.reduced)
                         .run();
    const auto want = gradients(shape, variant, merged(layout, tensors, factors),
                                Matrix<double>(forward.preactivations), Matrix<double>(grad_out));
    expect_near_gradients<TypeParam>(variant, got.tensors, want);
    expect_near_factors<TypeParam>(got.factors, factor_gradients(shape, layout, want, factors));
  });
}

// The test product, and the number of its multiply-adds so far.
template <class T>
class CountingGemm final : public Gemm<T> {
 public:
  using Gemm<T>::multiply;
  void multiply(GemmOperand<T> a, const Product<T>* products, int64_t count) const override {
    for (int64_t i = 0; i < count; ++i) multiply_adds += a.rows() * a.columns() * products[i].c.columns;
    test_gemm<T>().multiply(a, products, count);
  }

  mutable int64_t multiply_adds = 0;
};

TYPED_TEST(ExpertFfnBackwardTest, GradientsOfDownAreOneProductAndKeepThePreactivations) {
  for_every_case([](const FfnShape& shape, const Variant& variant) {
    const int64_t num_rows = shape.routing.num_rows();
    const auto tensors = FfnTensors<TypeParam>::random(shape, 1);
    const auto grad_out = Matrix<TypeParam>::random(shape.routing.num_tokens, shape.hidden_size, 9);
    const auto z = run_forward(shape, variant, tensors).preactivations;
    const auto want = gradients(shape, variant, tensors, z, grad_out);

    const CountingGemm<TypeParam> gemm;
    Matrix<TypeParam> activated(num_rows, shape.intermediate_size);
    FfnTensors<TypeParam> grads(shape);
    FfnBackward<TypeParam> backward(shape, variant, tensors, z, grad_out, SerialExecutor());
    auto a = backward.down_arguments();
    a.gemm = &gemm;
    a.keeps_preactivations = true;
    a.activated = activated.view();
    a.grad_down = stack(grads.down, shape.routing.num_experts);
    if (variant.biased) a.grad_bias = grads.down_bias.view();
    expert_ffn_backward_down(a, SerialExecutor());
    EXPECT_TRUE(grads.down.has_same_bits(want.down));
    EXPECT_TRUE(!variant.biased || grads.down_bias.has_same_bits(want.down_bias));
    EXPECT_TRUE(backward.preactivations().has_same_bits(z));
    EXPECT_EQ(gemm.multiply_adds, num_rows * shape.hidden_size * shape.intermediate_size);
  });
}

// Compares d/dstep <grad_out, out(tensors + step * direction)> with <gradient, direction>, one tensor at a time.
TEST(ExpertFfnGradients, MatchDifferences) {
  for_every_case([](const FfnShape& shape, const Variant& variant) {
    const auto tensors = FfnTensors<double>::random(shape, 1);
    const auto directions = FfnTensors<double>::random(shape, 100);
    const auto grad_out = Matrix<double>::random(shape.routing.num_tokens, shape.hidden_size, 9);
    const auto z = run_forward(shape, variant, tensors).preactivations;
    const auto grads = gradients(shape, variant, tensors, z, grad_out);
    for_every_gradient(variant, [&](const char* name, const auto& get) {
      FfnTensors<double> along(shape);
      along.for_each([](Matrix<double>& matrix) { matrix.fill(0.0); });
      get(along) = get(directions);
      constexpr double kStep = 1e-6;
      const NaiveFfn<double> naive(shape, variant.kind, variant.biased, variant.weighted, tensors, along);
      const double want = (dot(grad_out, naive(kStep)) - dot(grad_out, naive(-kStep))) / (2 * kStep);
      EXPECT_NEAR(dot(get(grads), get(directions)), want, 1e-7 * std::max(1.0, std::abs(want))) << name;
    });
  });
}

}  // namespace
}  // namespace maxmoe
