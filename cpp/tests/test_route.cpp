// Tests of route: scores, selection and weights against float64 loops, the backward pass against central differences.
#include "kernels/routing/route.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "matrix.h"

namespace maxmoe {
namespace {

using Values = std::vector<double>;

Values softmax(Values values) {
  const double largest = *std::max_element(values.begin(), values.end());
  double sum = 0.0;
  for (double& value : values) sum += value = std::exp(value - largest);
  for (double& value : values) value /= sum;
  return values;
}

Values naive_scores(ScoreFunction function, Values logits) {
  if (function == ScoreFunction::softmax) return softmax(logits);
  for (double& x : logits) {
    if (function == ScoreFunction::sigmoid) x = 1.0 / (1.0 + std::exp(-x));
    if (function == ScoreFunction::sqrtsoftplus) x = std::sqrt(std::log(1.0 + std::exp(x)));
  }
  return logits;
}

// Indices of the `count` largest values; among equal values the lowest index first.
std::vector<size_t> largest(const Values& values, size_t count) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] > values[b]; });
  order.resize(count);
  return order;
}

std::vector<size_t> naive_experts(const RoutingRule& rule, Values biased, size_t top_k) {
  const auto num_groups = static_cast<size_t>(rule.num_groups);
  const size_t group_size = biased.size() / num_groups;
  Values group_scores;
  for (size_t g = 0; g < num_groups; ++g) {
    const auto begin = biased.begin() + static_cast<std::ptrdiff_t>(g * group_size);
    Values group(begin, begin + static_cast<std::ptrdiff_t>(group_size));
    std::sort(group.rbegin(), group.rend());
    const bool counts_second = rule.group_score == GroupScore::top2 && group_size > 1;
    group_scores.push_back(group[0] + (counts_second ? group[1] : 0.0));
  }
  const std::vector<size_t> selected_groups = largest(group_scores, static_cast<size_t>(rule.top_k_groups));
  for (size_t e = 0; e < biased.size(); ++e) {
    const bool is_selected =
        std::find(selected_groups.begin(), selected_groups.end(), e / group_size) != selected_groups.end();
    if (!is_selected) biased[e] = -std::numeric_limits<double>::infinity();
  }
  return largest(biased, top_k);
}

Values naive_probabilities(ScoreFunction function, const Values& logits) {
  if (function == ScoreFunction::identity) return softmax(logits);
  Values scores = naive_scores(function, logits);
  const double sum = std::accumulate(scores.begin(), scores.end(), 1e-20);
  for (double& score : scores) score /= sum;
  return scores;
}

Values naive_weights(const RoutingRule& rule, const Values& logits, const std::vector<size_t>& experts) {
  const Values scores = naive_scores(rule.score_function, logits);
  Values weights;
  for (const size_t expert : experts) weights.push_back(scores[expert]);
  if (rule.normalization == Normalization::softmax) weights = softmax(weights);
  double sum = 1e-20;
  for (const double weight : weights) sum += weight;
  for (double& weight : weights) weight *= rule.scale / (rule.normalization == Normalization::sum ? sum : 1.0);
  return weights;
}

template <class T>
struct Routed {
  Matrix<T> weights;
  Matrix<int64_t> experts;
  Matrix<T> probabilities;
};

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
Values row_of(const Matrix<T>& matrix, int64_t r) {
  Values values;
  for (int64_t c = 0; c < matrix.columns(); ++c) values.push_back(matrix(r, c));
  return values;
}

template <class T>
void check_forward(const RoutingRule& rule, const Matrix<T>& logits, const Matrix<T>* bias, int64_t top_k) {
  Routed<T> got = run_route(rule, logits, bias, top_k);
  for (int64_t t = 0; t < logits.rows(); ++t) {
    Values biased = naive_scores(rule.score_function, row_of(logits, t));
    for (size_t e = 0; e < biased.size() && bias; ++e) biased[e] += (*bias)(0, static_cast<int64_t>(e));
    const std::vector<size_t> experts = naive_experts(rule, biased, static_cast<size_t>(top_k));
    const Values weights = naive_weights(rule, row_of(logits, t), experts);
    for (int64_t k = 0; k < top_k; ++k) {
      const auto i = static_cast<size_t>(k);
      ASSERT_EQ(got.experts.element(t, k), static_cast<int64_t>(experts[i])) << "token " << t << ", place " << k;
      ASSERT_NEAR(got.weights(t, k), weights[i], tolerance<T>() * std::max(1.0, std::abs(weights[i])));
    }
    const Values probabilities = naive_probabilities(rule.score_function, row_of(logits, t));
    for (int64_t e = 0; e < logits.columns(); ++e) {
      ASSERT_NEAR(got.probabilities(t, e), probabilities[static_cast<size_t>(e)], tolerance<T>());
    }
  }
}

// Compares with central differences of <grad_weights, weights> + <grad_probabilities, probabilities> for fixed experts.
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
  constexpr double kStep = 1e-5;
  for (int64_t t = 0; t < logits.rows(); ++t) {
    std::vector<size_t> experts;
    for (int64_t k = 0; k < top_k; ++k) experts.push_back(static_cast<size_t>(routed.experts.view().row(t)[k]));
    const Values grad = row_of(grad_weights, t);
    for (int64_t e = 0; e < logits.columns(); ++e) {
      Values above = row_of(logits, t);
      Values below = above;
      above[static_cast<size_t>(e)] += kStep;
      below[static_cast<size_t>(e)] -= kStep;
      const Values weights_above = naive_weights(rule, above, experts);
      const Values weights_below = naive_weights(rule, below, experts);
      double want = 0.0;
      for (size_t k = 0; k < grad.size(); ++k) want += grad[k] * (weights_above[k] - weights_below[k]) / (2 * kStep);
      const Values probabilities_above = naive_probabilities(rule.score_function, above);
      const Values probabilities_below = naive_probabilities(rule.score_function, below);
      for (size_t i = 0; i < above.size() && has_loss; ++i) {
        want += row_of(grad_probabilities, t)[i] * (probabilities_above[i] - probabilities_below[i]) / (2 * kStep);
      }
      ASSERT_NEAR(got(t, e), want, std::max(1e-8, 2 * tolerance<T>()) * std::max(1.0, std::abs(want)));
    }
  }
}

struct Case {
  int64_t num_experts, top_k, num_groups, top_k_groups;
  GroupScore group_score = GroupScore::top2;
};
const std::vector<Case> kCases = {{1, 1, 1, 1},  {3, 3, 1, 1},  {7, 2, 1, 1},
                                  {33, 6, 1, 1}, {8, 2, 4, 2},  {8, 2, 4, 2, GroupScore::max},
                                  {12, 5, 3, 2}, {40, 8, 8, 4}, {40, 8, 8, 4, GroupScore::max},
                                  {5, 2, 5, 3}};

template <class Check>
void for_every_rule(const Case& c, const Check& check) {
  for (const ScoreFunction function :
       {ScoreFunction::softmax, ScoreFunction::sigmoid, ScoreFunction::sqrtsoftplus, ScoreFunction::identity}) {
    for (const Normalization normalization : {Normalization::none, Normalization::sum, Normalization::softmax}) {
      // Identity scores may be negative: their sum may be close to 0.
      if (function == ScoreFunction::identity && normalization == Normalization::sum) continue;
      SCOPED_TRACE(testing::Message() << c.num_experts << " experts, top " << c.top_k << " of " << c.top_k_groups << "/"
                                      << c.num_groups << " groups by score " << static_cast<int>(c.group_score)
                                      << ", score function " << static_cast<int>(function) << ", normalization "
                                      << static_cast<int>(normalization));
      check(RoutingRule{function, normalization, 2.5, c.num_groups, c.top_k_groups, c.group_score});
    }
  }
}

template <class T>
class RouteTest : public testing::Test {};
using RouteDtypes = testing::Types<double, float>;
TYPED_TEST_SUITE(RouteTest, RouteDtypes, DtypeNames);

TYPED_TEST(RouteTest, MatchesTheLoop) {
  for (const Case& c : kCases) {
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
  for (const Case& c : kCases) {
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
  Matrix<TypeParam> logits(2, 3);
  for (int64_t e = 0; e < 3; ++e) {
    logits.element(0, e) = static_cast<TypeParam>(1e4) * static_cast<TypeParam>(e - 1);
    logits.element(1, e) = static_cast<TypeParam>(-1e4) - static_cast<TypeParam>(e);
  }
  for (const ScoreFunction function :
       {ScoreFunction::softmax, ScoreFunction::sigmoid, ScoreFunction::sqrtsoftplus, ScoreFunction::identity}) {
    const RoutingRule rule{function, Normalization::none, 1.0, 1, 1};
    const Routed<TypeParam> got = run_route<TypeParam>(rule, logits, nullptr, 3);
    for (int64_t t = 0; t < 2; ++t) {
      for (int64_t k = 0; k < 3; ++k) EXPECT_TRUE(std::isfinite(got.weights(t, k))) << static_cast<int>(function);
    }
  }
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

}  // namespace
}  // namespace maxmoe
