// Tests of route: scores, selection and weights against float64 loops, the backward pass against central differences.
#include "kernels/routing/route.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "matrix.h"
#include "naive_route.h"

namespace maxmoe {
namespace {

template <class T>
Routed<T> run_route(const RoutingRule& rule, const Matrix<T>& logits, const Matrix<T>* bias, int64_t top_k,
                    const int64_t* given = nullptr) {
  Matrix<int64_t> experts(logits.rows(), top_k);
  Matrix<T> probabilities(logits.rows(), logits.columns());
  const auto weights = run_kernel<T>(logits.rows(), top_k, [&](MatrixView<T> view, const Executor& executor) {
    route(Route<T>{logits.view(), bias ? bias->view().data : nullptr, given, rule, view, experts.view(),
                   probabilities.view()},
          executor);
  });
  EXPECT_TRUE(experts.gap_is_intact());
  EXPECT_TRUE(probabilities.gap_is_intact());
  return {weights, experts, probabilities};
}

template <class T>
void check_forward(const RoutingRule& rule, const Matrix<T>& logits, const Matrix<T>* bias, int64_t top_k) {
  expect_routed(rule, logits, bias, run_route(rule, logits, bias, top_k));
}

template <class T>
void check_backward(const RoutingRule& rule, const Matrix<T>& logits, int64_t top_k, bool has_loss) {
  const Routed<T> routed = run_route<T>(rule, logits, nullptr, top_k);
  const auto grad_weights = Matrix<T>::random(logits.rows(), top_k, 5);
  const auto grad_probabilities = Matrix<T>::random(logits.rows(), logits.columns(), 6);
  const auto got = run_kernel<T>(logits.rows(), logits.columns(), [&](MatrixView<T> view, const Executor& executor) {
    route_backward(RouteBackward<T>{grad_weights.view(), has_loss ? grad_probabilities.view() : ConstMatrixView<T>{},
                                    logits.view(), routed.experts.view(), rule, view},
                   executor);
  });
  expect_gradient(rule, logits, routed.experts, grad_weights, has_loss ? &grad_probabilities : nullptr, got);
}

template <class T>
class RouteTest : public testing::Test {};
TYPED_TEST_SUITE(RouteTest, RouteDtypes, DtypeNames);

TYPED_TEST(RouteTest, MatchesTheLoop) {
  for (const RouteCase& c : kRouteCases) {
    for (const int64_t num_tokens : {0, 1, 19}) {
      const auto logits = Matrix<TypeParam>::random(num_tokens, c.num_experts, 1);
      const auto bias = Matrix<TypeParam>::random(1, c.num_experts, 2);
      for_every_rule(c, [&](const RoutingRule& rule) {
        check_forward<TypeParam>(rule, logits, nullptr, c.top_k);
        check_forward<TypeParam>(rule, logits, &bias, c.top_k);
      });
    }
  }
}

TYPED_TEST(RouteTest, BackwardMatchesDifferences) {
  for (const RouteCase& c : kRouteCases) {
    const auto logits = Matrix<TypeParam>::random(3, c.num_experts, 1);
    for_every_rule(c, [&](const RoutingRule& rule) {
      check_backward<TypeParam>(rule, logits, c.top_k, false);
      check_backward<TypeParam>(rule, logits, c.top_k, true);
    });
  }
}

// route with the experts that it selected itself gives the same bits. A slot without an expert has weight 0, and the
// others have the weights that they would have without it.
TYPED_TEST(RouteTest, TakesGivenExperts) {
  const auto logits = Matrix<TypeParam>::random(7, 12, 1);
  for_every_rule({12, 3, 1, 1}, [&](const RoutingRule& rule) {
    Routed<TypeParam> selected = run_route<TypeParam>(rule, logits, nullptr, 3);
    std::vector<int64_t> given;
    for (int64_t t = 0; t < 7; ++t) {
      for (int64_t k = 0; k < 3; ++k) given.push_back(selected.experts.element(t, k));
    }
    const Routed<TypeParam> again = run_route<TypeParam>(rule, logits, nullptr, 3, given.data());
    for (int64_t t = 0; t < 7; ++t) given[static_cast<size_t>(3 * t + 1)] = -1;
    const Routed<TypeParam> without = run_route<TypeParam>(rule, logits, nullptr, 3, given.data());
    for (int64_t t = 0; t < 7; ++t) {
      for (int64_t k = 0; k < 3; ++k) EXPECT_EQ(again.weights(t, k), selected.weights(t, k));
      const std::vector<size_t> rest = {static_cast<size_t>(given[static_cast<size_t>(3 * t)]),
                                        static_cast<size_t>(given[static_cast<size_t>(3 * t + 2)])};
      const Values weights = naive_weights(rule, row_of(logits, t), rest);
      EXPECT_EQ(without.weights(t, 1), 0.0);
      EXPECT_NEAR(without.weights(t, 0), weights[0], tolerance<TypeParam>() * std::max(1.0, std::abs(weights[0])));
      EXPECT_NEAR(without.weights(t, 2), weights[1], tolerance<TypeParam>() * std::max(1.0, std::abs(weights[1])));
    }
  });
}

TYPED_TEST(RouteTest, ManyTasks) {
  const RoutingRule rule{ScoreFunction::softmax, Normalization::sum, 1.0, 1, 1};
  check_forward<TypeParam>(rule, Matrix<TypeParam>::random(1500, 33, 1), nullptr, 4);
}

TYPED_TEST(RouteTest, TheLowestIndexWinsATie) {
  const RoutingRule rule{ScoreFunction::sigmoid, Normalization::none, 1.0, 4, 2};
  Matrix<TypeParam> logits(1, 8);
  for (int64_t e = 0; e < 8; ++e) logits.element(0, e) = 0.5;
  Routed<TypeParam> got = run_route<TypeParam>(rule, logits, nullptr, 3);
  for (int64_t k = 0; k < 3; ++k) EXPECT_EQ(got.experts.element(0, k), k);
}

TYPED_TEST(RouteTest, LargeLogitsDoNotOverflow) {
  expect_no_overflow<TypeParam>([](const RoutingRule& rule, const Matrix<TypeParam>& logits, int64_t top_k) {
    return run_route<TypeParam>(rule, logits, nullptr, top_k);
  });
}

TYPED_TEST(RouteTest, NanLogitsChooseNoExpert) {
  const RoutingRule rule{ScoreFunction::softmax, Normalization::sum, 1.0, 2, 1};
  auto logits = Matrix<TypeParam>::random(3, 8, 1);
  logits.element(1, 5) = std::numeric_limits<TypeParam>::quiet_NaN();
  Routed<TypeParam> got = run_route<TypeParam>(rule, logits, nullptr, 2);
  for (int64_t k = 0; k < 2; ++k) {
    EXPECT_EQ(got.experts.element(1, k), kNotANumber);
    EXPECT_EQ(got.weights(1, k), 0.0);
    EXPECT_GE(got.experts.element(0, k), 0);
    EXPECT_GE(got.experts.element(2, k), 0);
  }
}

TYPED_TEST(RouteTest, EntropyMatchesTheLoop) {
  for (const int64_t num_tokens : {0, 1, 19, 1500}) {
    for (const int64_t num_experts : {1, 7, 33}) {
      auto probabilities = Matrix<TypeParam>::random(num_tokens, num_experts, 1);
      double want = 0.0;
      for (int64_t t = 0; t < num_tokens; ++t) {
        for (int64_t e = 0; e < num_experts; ++e) {
          // Not only numbers below 1, and some that are 0.
          auto& p = probabilities.element(t, e);
          p = (t + e) % 5 == 0 ? TypeParam(0) : std::abs(p);
          if (p > 0) want -= static_cast<double>(p) * std::log(static_cast<double>(p)) / 3;
        }
      }
      const auto got = run_kernel<TypeParam>(1, 1, [&](MatrixView<TypeParam> view, const Executor& executor) {
        router_entropy(RouterEntropy<TypeParam>{probabilities.view().as_const(), 3, view.data}, executor);
      });
      EXPECT_NEAR(got(0, 0), want, tolerance<TypeParam>() * std::max(1.0, static_cast<double>(num_tokens)));
    }
  }
}

}  // namespace
}  // namespace maxmoe
