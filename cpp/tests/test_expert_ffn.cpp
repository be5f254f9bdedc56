// Tests of the fused experts: the forward pass against float64 loops, gradients against differences in random
// directions.
#include "kernels/expert_ffn.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "eigen_products.h"
#include "matrix.h"
#include "naive_ffn.h"
#include "routing.h"

namespace maxmoe {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

struct Variant {
  ActivationKind kind;
  bool biased;
  bool weighted;

  bool is_gated() const { return kind.gate != GateLayout::none; }
};

const std::vector<Variant> kVariants = {
    {{Activation::silu, GateLayout::separate, kNoLimit}, false, true},
    {{Activation::silu, GateLayout::separate, 0.5}, true, true},
    {{Activation::gelu, GateLayout::separate, kNoLimit}, true, false},
    {{Activation::gelu_tanh, GateLayout::separate, kNoLimit}, false, true},
    {{Activation::relu, GateLayout::separate, 1.0}, true, true},
    {{Activation::swigluoai, GateLayout::separate, 0.7}, true, true},
    {{Activation::silu, GateLayout::concatenated, kNoLimit}, true, true},
    {{Activation::swigluoai, GateLayout::interleaved, 0.7}, true, true},
    {{Activation::silu, GateLayout::interleaved, kNoLimit}, false, false},
    {{Activation::relu2, GateLayout::none, kNoLimit}, true, true},
    {{Activation::silu, GateLayout::none, kNoLimit}, false, false},
    {{Activation::gelu_tanh, GateLayout::none, kNoLimit}, true, true},
};

std::vector<FfnShape> shapes() {
  return {{random_routing(0, 2, 3, 1), 5, 7},   {random_routing(1, 1, 1, 1), 1, 1},
          {random_routing(17, 2, 3, 1), 9, 13}, {random_routing(7, 4, 31, 1), 3, 40},
          {all_to_one_routing(11, 4, 2), 8, 5}, {plan_routing(3, 1, 2, {-1, -1, -1}), 4, 4}};
}

template <class T>
struct Forward {
  Matrix<T> preactivations;
  Matrix<T> out;
};

template <class T>
Forward<T> run_forward(const FfnShape& shape, const Variant& variant, const FfnTensors<T>& tensors) {
  const Routing& routing = shape.routing;
  const int64_t width = shape.intermediate_size * (variant.is_gated() ? 2 : 1);
  Matrix<T> preactivations(routing.num_rows(), width);
  ExpertFfn<T> a;
  a.x = tensors.x.view();
  a.weights = variant.weighted ? tensors.weights.view().data : nullptr;
  a.routed = routed_rows(routing);
  const Projections<T> projections(variant.kind.gate, tensors, routing.num_experts);
  a.experts = projections.experts(tensors, variant.biased);
  a.kind = variant.kind;
  a.gemm = &test_gemm<T>();
  const auto run = [&](MatrixView<T> out, const Executor& executor) {
    Matrix<T> rows(routing.num_rows(), shape.hidden_size);
    a.rows = rows.view();
    a.out = out;
    expert_ffn(a, executor);
  };
  const Matrix<T> lean = run_kernel<T>(routing.num_tokens, shape.hidden_size, run);
  a.preactivations = preactivations.view();
  const Matrix<T> out = run_kernel<T>(routing.num_tokens, shape.hidden_size, run);
  EXPECT_TRUE(out.has_same_bits(lean)) << "out depends on whether Z is stored";
  const auto run_alone = [&](MatrixView<T> again, const Executor& executor) {
    a.preactivations = again;
    a.rows = a.out = {};
    expert_ffn(a, executor);
  };
  const Matrix<T> alone = run_kernel<T>(routing.num_rows(), width, run_alone);
  EXPECT_TRUE(alone.has_same_bits(preactivations)) << "Z depends on whether out is computed";
  return {preactivations, out};
}

// The arguments of the backward pass through down, without work space and results.
template <class T>
ExpertFfnBackwardDown<T> backward_down(const FfnShape& shape, const Variant& variant, const FfnTensors<T>& tensors,
                                       Matrix<T>& preactivations, const Matrix<T>& grad_out, const Gemm<T>* gemm) {
  ExpertFfnBackwardDown<T> a{};
  a.grad_out = grad_out.view();
  a.weights = variant.weighted ? tensors.weights.view().data : nullptr;
  a.routed = routed_rows(shape.routing);
  a.down = stack(tensors.down, shape.routing.num_experts);
  if (variant.biased) a.down_bias = tensors.down_bias.view();
  a.kind = variant.kind;
  a.gemm = gemm;
  a.preactivations = preactivations.view();
  return a;
}

// Computes the gradients of <grad_out, out>, in the layout of the tensors.
template <class T>
FfnTensors<T> run_backward(const FfnShape& shape, const Variant& variant, const FfnTensors<T>& tensors,
                           Matrix<T> preactivations, const Matrix<T>& grad_out, const Executor& executor) {
  const Routing& routing = shape.routing;
  Matrix<T> activated(routing.num_rows(), shape.intermediate_size);
  Matrix<T> grad_rows(routing.num_rows(), shape.hidden_size);
  FfnTensors<T> grads(shape);
  grads.weights.fill(0.0);  // the gradient of a slot without a row is not written

  const Projections<T> projections(variant.kind.gate, tensors, routing.num_experts);
  const ExpertWeights<T> experts = projections.experts(tensors, variant.biased);
  const Gemm<T>* gemm = &test_gemm<T>();

  ExpertFfnBackwardDown<T> down = backward_down(shape, variant, tensors, preactivations, grad_out, gemm);
  down.activated = activated.view();
  if (variant.weighted) down.grad_weights = grads.weights.view().data;
  down.grad_down = stack(grads.down, routing.num_experts);
  if (variant.biased) down.grad_down_bias = grads.down_bias.view();
  expert_ffn_backward_down(down, executor);

  const ConstMatrixView<T> grad_preactivations = preactivations.view().as_const();
  ExpertFfnBackwardInput<T> input{};
  input.grad_preactivations = grad_preactivations;
  input.routed = down.routed;
  input.gate = experts.gate;
  input.up = experts.up;
  input.gemm = gemm;
  input.rows = grad_rows.view();
  input.grad_x = grads.x.view();
  expert_ffn_backward_input(input, executor);

  Projections<T> grad_projections(variant.kind.gate, grads, routing.num_experts);
  ExpertFfnBackwardUp<T> up{};
  up.x = tensors.x.view();
  up.grad_preactivations = grad_preactivations;
  up.gate_width = experts.gate.first.columns;
  up.routed = down.routed;
  up.gemm = gemm;
  grad_projections.collect_into(up, variant.biased);
  expert_ffn_backward_up(up, executor);
  grad_projections.copy_to(grads);
  return grads;
}

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

template <class Check>
void for_every_case(const Check& check) {
  const std::vector<FfnShape> all = shapes();
  for (size_t s = 0; s < all.size(); ++s) {
    for (size_t v = 0; v < kVariants.size(); ++v) {
      SCOPED_TRACE(testing::Message() << "shape " << s << ", variant " << v);
      check(all[s], kVariants[v]);
    }
  }
}

template <class T>
class ExpertFfnTest : public testing::Test {};
TYPED_TEST_SUITE(ExpertFfnTest, Dtypes, DtypeNames);

TYPED_TEST(ExpertFfnTest, MatchesTheLoop) {
  for_every_case([](const FfnShape& shape, const Variant& variant) {
    const auto tensors = FfnTensors<TypeParam>::random(shape, 1);
    const NaiveFfn<TypeParam> naive(shape, variant.kind, variant.biased, variant.weighted, tensors, tensors);
    expect_near(run_forward(shape, variant, tensors).out, naive(0.0), 16.0);
  });
}

TYPED_TEST(ExpertFfnTest, MoreRowsThanOneTileAndColumnsThanOneBlock) {
  const FfnShape shape{all_to_one_routing(150, 2, 1), 131, 270};
  const Variant variant{{Activation::silu, GateLayout::separate, kNoLimit}, true, true};
  const auto tensors = FfnTensors<TypeParam>::random(shape, 1);
  const NaiveFfn<TypeParam> naive(shape, variant.kind, variant.biased, variant.weighted, tensors, tensors);
  expect_near(run_forward(shape, variant, tensors).out, naive(0.0), 64.0);
}

TYPED_TEST(ExpertFfnTest, GradientsDoNotDependOnTheNumberOfThreads) {
  const FfnShape shape{random_routing(150, 2, 3, 1), 131, 35};
  const Variant& variant = kVariants[1];
  const auto tensors = FfnTensors<TypeParam>::random(shape, 1);
  const auto grad_out = Matrix<TypeParam>::random(150, 131, 9);
  const auto z = run_forward(shape, variant, tensors).preactivations;
  const auto serial = run_backward(shape, variant, tensors, z, grad_out, SerialExecutor());
  const auto threaded = run_backward(shape, variant, tensors, z, grad_out, ThreadExecutor(4));
  for_every_gradient(variant, [&](const char* name, const auto& get) {
    EXPECT_TRUE(get(serial).has_same_bits(get(threaded))) << name;
    EXPECT_TRUE(get(serial).gap_is_intact()) << name;
  });
}

// Compares with the gradients of float64 up to the rounding of the type. Both get the same preactivations, because
// rounding could move one across the kink of a clip.
TYPED_TEST(ExpertFfnTest, GradientsAreThoseOfFloat64) {
  for_every_case([](const FfnShape& shape, const Variant& variant) {
    const auto tensors = FfnTensors<TypeParam>::random(shape, 1);
    const auto grad_out = Matrix<TypeParam>::random(shape.routing.num_tokens, shape.hidden_size, 9);
    const auto z = run_forward(shape, variant, tensors).preactivations;
    const auto got = run_backward(shape, variant, tensors, z, grad_out, SerialExecutor());
    const auto want = run_backward(shape, variant, FfnTensors<double>(tensors), Matrix<double>(z),
                                   Matrix<double>(grad_out), SerialExecutor());
    for_every_gradient(variant, [&](const char* name, const auto& get) {
      SCOPED_TRACE(name);
      expect_near(Matrix<double>(get(got)), get(want), 24.0 * tolerance<TypeParam>() / tolerance<double>());
    });
  });
}

// The test product, and the number of its multiply-adds so far.
template <class T>
class CountingGemm final : public Gemm<T> {
 public:
  bool bits_depend_on_tiles() const override { return test_gemm<T>().bits_depend_on_tiles(); }

  using Gemm<T>::multiply;
  void multiply(GemmOperand<T> a, const Product<T>* products, int64_t count) const override {
    for (int64_t i = 0; i < count; ++i) multiply_adds += a.rows() * a.columns() * products[i].c.columns;
    test_gemm<T>().multiply(a, products, count);
  }

  mutable int64_t multiply_adds = 0;
};

TYPED_TEST(ExpertFfnTest, GradientsOfDownAreOneProductAndKeepThePreactivations) {
  for_every_case([](const FfnShape& shape, const Variant& variant) {
    const int64_t num_rows = shape.routing.num_rows();
    const auto tensors = FfnTensors<TypeParam>::random(shape, 1);
    const auto grad_out = Matrix<TypeParam>::random(shape.routing.num_tokens, shape.hidden_size, 9);
    const auto z = run_forward(shape, variant, tensors).preactivations;
    const auto want = run_backward(shape, variant, tensors, z, grad_out, SerialExecutor());

    const CountingGemm<TypeParam> gemm;
    Matrix<TypeParam> preactivations = z;
    Matrix<TypeParam> activated(num_rows, shape.intermediate_size);
    FfnTensors<TypeParam> grads(shape);
    auto a = backward_down<TypeParam>(shape, variant, tensors, preactivations, grad_out, &gemm);
    a.keeps_preactivations = true;
    a.activated = activated.view();
    a.grad_down = stack(grads.down, shape.routing.num_experts);
    if (variant.biased) a.grad_down_bias = grads.down_bias.view();
    expert_ffn_backward_down(a, SerialExecutor());
    EXPECT_TRUE(grads.down.has_same_bits(want.down));
    EXPECT_TRUE(!variant.biased || grads.down_bias.has_same_bits(want.down_bias));
    EXPECT_TRUE(preactivations.has_same_bits(z));
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
    const auto grads = run_backward(shape, variant, tensors, z, grad_out, SerialExecutor());
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
