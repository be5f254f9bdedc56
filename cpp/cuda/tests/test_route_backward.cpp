// Tests of the CUDA kernel route_backward against central differences of float64 loops.
#include "emulated.h"
#include "naive_route.h"

namespace maxmoe {
namespace {

template <class T>
Matrix<int64_t> largest_experts(const RoutingRule& rule, const Matrix<T>& logits, int64_t top_k) {
  Matrix<int64_t> experts(logits.rows(), top_k);
  for (int64_t t = 0; t < logits.rows(); ++t) {
    const auto chosen =
        naive_experts(rule, naive_scores(rule.score_function, row_of(logits, t)), static_cast<size_t>(top_k));
    for (size_t k = 0; k < chosen.size(); ++k) {
      experts.element(t, static_cast<int64_t>(k)) = static_cast<int64_t>(chosen[k]);
    }
  }
  return experts;
}

template <class T>
Matrix<T> run_backward(const RoutingRule& rule, const Matrix<T>& logits, const Matrix<int64_t>& experts,
                       const Matrix<T>& grad_weights, const Matrix<T>* grad_probabilities) {
  return run_emulated<T>(logits.rows(), logits.columns(), 3, [&](MatrixView<T> view) {
    cuda::route_backward(
        RouteBackward<T>{grad_weights.view(), grad_probabilities ? grad_probabilities->view() : ConstMatrixView<T>{},
                         logits.view(), experts.view(), rule, view},
        nullptr);
  });
}

template <class T>
class CudaRouteBackwardTest : public testing::Test {};
TYPED_TEST_SUITE(CudaRouteBackwardTest, RouteDtypes, DtypeNames);

TYPED_TEST(CudaRouteBackwardTest, MatchesDifferences) {
  for (const RouteCase& c : kRouteCases) {
    const auto logits = Matrix<TypeParam>::random(3, c.num_experts, 1);
    const auto grad_weights = Matrix<TypeParam>::random(3, c.top_k, 5);
    const auto grad_probabilities = Matrix<TypeParam>::random(3, c.num_experts, 6);
    for_every_rule(c, [&](const RoutingRule& rule) {
      const auto experts = largest_experts(rule, logits, c.top_k);
      for (const auto* loss : {&grad_probabilities, static_cast<const Matrix<TypeParam>*>(nullptr)}) {
        expect_gradient(rule, logits, experts, grad_weights, loss,
                        run_backward(rule, logits, experts, grad_weights, loss));
      }
    });
  }
}

TYPED_TEST(CudaRouteBackwardTest, ManyTokensAndExperts) {
  const RoutingRule rule{ScoreFunction::softmax, Normalization::sum, 2.5, 1, 1};
  const auto logits = Matrix<TypeParam>::random(11, 70, 1);
  const auto grad_weights = Matrix<TypeParam>::random(11, 35, 5);
  const auto experts = largest_experts(rule, logits, 35);
  expect_gradient<TypeParam>(rule, logits, experts, grad_weights, nullptr,
                             run_backward<TypeParam>(rule, logits, experts, grad_weights, nullptr));
}

// A slot without an expert does not change the gradient of the other slots.
TYPED_TEST(CudaRouteBackwardTest, ASlotWithoutAnExpertHasNoGradient) {
  const auto logits = Matrix<TypeParam>::random(1, 12, 1);
  const auto grad_of_two = Matrix<TypeParam>::random(1, 2, 5);
  for_every_rule({12, 3, 1, 1}, [&](const RoutingRule& rule) {
    Matrix<int64_t> two(1, 2);
    Matrix<int64_t> three(1, 3);
    Matrix<TypeParam> grad_of_three(1, 3);
    two.element(0, 0) = three.element(0, 0) = 7;
    two.element(0, 1) = three.element(0, 2) = 3;
    three.element(0, 1) = -1;
    grad_of_three.element(0, 0) = static_cast<TypeParam>(grad_of_two(0, 0));
    grad_of_three.element(0, 1) = TypeParam(3);
    grad_of_three.element(0, 2) = static_cast<TypeParam>(grad_of_two(0, 1));
    const auto got = run_backward<TypeParam>(rule, logits, three, grad_of_three, nullptr);
    const auto want = run_backward<TypeParam>(rule, logits, two, grad_of_two, nullptr);
    EXPECT_EQ(got, want);
  });
}

// The common part of the gradient of the weights changes nothing, not even where the scores are small: their sum is a
// divisor.
TEST(CudaRouteBackwardSum, EqualGradientsOfSmallScoresGiveZero) {
  const RoutingRule rule{ScoreFunction::sigmoid, Normalization::sum, 1.0, 1, 1};
  Matrix<float> logits(1, 4);
  for (int64_t e = 0; e < 4; ++e) logits.element(0, e) = -12.0F - 0.3F * static_cast<float>(e);
  Matrix<int64_t> experts(1, 3);
  for (int64_t k = 0; k < 3; ++k) experts.element(0, k) = k;
  for (const float common : {0.7F, 0.1F, 1.3F, 3.7F, 0.33F, 100.3F}) {
    Matrix<float> grad(1, 3);
    grad.fill(common);
    const auto got = run_backward<float>(rule, logits, experts, grad, nullptr);
    for (int64_t e = 0; e < 4; ++e) EXPECT_NEAR(got(0, e), 0.0, 1e-12);
  }
}

TEST(CudaRouteBackwardErrors, NameOperatorAndArgument) {
  const RoutingRule rule{ScoreFunction::softmax, Normalization::sum, 1.0, 1, 1};
  const auto logits = Matrix<float>::random(1, 4, 1);
  const auto grad = Matrix<float>::random(1, 1, 1);
  for (const int64_t wrong : {-2, 4}) {
    Matrix<int64_t> experts(1, 1);
    experts.element(0, 0) = wrong;
    EXPECT_EQ(error_of([&] { run_backward<float>(rule, logits, experts, grad, nullptr); }),
              "maxmoe::route_backward: a value of experts is out of range (-1 or one of E experts)");
  }
}

}  // namespace
}  // namespace maxmoe
