// Routing in float64 loops, comparisons with them, and the cases that the tests of route share.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <vector>

#include "kernels/routing/route.h"
#include "matrix.h"

namespace maxmoe {

using Values = std::vector<double>;
using RouteDtypes = testing::Types<double, float>;
constexpr ScoreFunction kScoreFunctions[] = {ScoreFunction::softmax, ScoreFunction::sigmoid,
                                             ScoreFunction::sqrtsoftplus, ScoreFunction::identity};

inline Values softmax(Values values) {
  const double largest = *std::max_element(values.begin(), values.end());
  double sum = 0.0;
  for (double& value : values) sum += value = std::exp(value - largest);
  for (double& value : values) value /= sum;
  return values;
}

inline Values naive_scores(ScoreFunction function, Values logits) {
  if (function == ScoreFunction::softmax) return softmax(logits);
  for (double& x : logits) {
    if (function == ScoreFunction::sigmoid) x = 1.0 / (1.0 + std::exp(-x));
    if (function == ScoreFunction::sqrtsoftplus) x = std::sqrt(std::log(1.0 + std::exp(x)));
  }
  return logits;
}

// Indices of the `count` largest values; among equal values the lowest index first.
inline std::vector<size_t> largest(const Values& values, size_t count) {
  std::vector<size_t> order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) { return values[a] > values[b]; });
  order.resize(count);
  return order;
}

inline std::vector<size_t> naive_experts(const RoutingRule& rule, Values biased, size_t top_k) {
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

inline Values naive_probabilities(ScoreFunction function, const Values& logits) {
  if (function == ScoreFunction::identity) return softmax(logits);
  Values scores = naive_scores(function, logits);
  const double sum = std::accumulate(scores.begin(), scores.end(), 1e-20);
  for (double& score : scores) score /= sum;
  return scores;
}

inline Values naive_weights(const RoutingRule& rule, const Values& logits, const std::vector<size_t>& experts) {
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
Values row_of(const Matrix<T>& matrix, int64_t r) {
  Values values;
  for (int64_t c = 0; c < matrix.columns(); ++c) values.push_back(matrix(r, c));
  return values;
}

// What route returns.
template <class T>
struct Routed {
  Matrix<T> weights;
  Matrix<int64_t> experts;
  Matrix<T> probabilities;
};

// Compares with the loops.
template <class T>
void expect_routed(const RoutingRule& rule, const Matrix<T>& logits, const Matrix<T>* bias, const Routed<T>& got) {
  for (int64_t t = 0; t < logits.rows(); ++t) {
    Values biased = naive_scores(rule.score_function, row_of(logits, t));
    for (size_t e = 0; e < biased.size() && bias; ++e) biased[e] += (*bias)(0, static_cast<int64_t>(e));
    const auto top_k = static_cast<size_t>(got.experts.columns());
    const std::vector<size_t> experts = naive_experts(rule, biased, top_k);
    const Values weights = naive_weights(rule, row_of(logits, t), experts);
    for (size_t k = 0; k < top_k; ++k) {
      const auto column = static_cast<int64_t>(k);
      ASSERT_EQ(got.experts.view().row(t)[k], static_cast<int64_t>(experts[k])) << "token " << t << ", place " << k;
      ASSERT_NEAR(got.weights(t, column), weights[k], tolerance<T>() * std::max(1.0, std::abs(weights[k])));
    }
    const Values probabilities = naive_probabilities(rule.score_function, row_of(logits, t));
    for (int64_t e = 0; e < logits.columns(); ++e) {
      ASSERT_NEAR(got.probabilities(t, e), probabilities[static_cast<size_t>(e)], tolerance<T>());
    }
  }
}

// Compares with central differences of <grad_weights, weights> + <grad_probabilities, probabilities> for fixed experts.
template <class T>
void expect_gradient(const RoutingRule& rule, const Matrix<T>& logits, const Matrix<int64_t>& chosen,
                     const Matrix<T>& grad_weights, const Matrix<T>* grad_probabilities, const Matrix<T>& got) {
  constexpr double kStep = 1e-5;
  for (int64_t t = 0; t < logits.rows(); ++t) {
    std::vector<size_t> experts;
    for (int64_t k = 0; k < chosen.columns(); ++k) experts.push_back(static_cast<size_t>(chosen.view().row(t)[k]));
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
      for (size_t i = 0; i < above.size() && grad_probabilities; ++i) {
        const double grad_probability = (*grad_probabilities)(t, static_cast<int64_t>(i));
        want += grad_probability * (probabilities_above[i] - probabilities_below[i]) / (2 * kStep);
      }
      ASSERT_NEAR(got(t, e), want, std::max(1e-8, 2 * tolerance<T>()) * std::max(1.0, std::abs(want)));
    }
  }
}

struct RouteCase {
  int64_t num_experts, top_k, num_groups, top_k_groups;
  GroupScore group_score = GroupScore::top2;
};
inline const std::vector<RouteCase> kRouteCases = {{1, 1, 1, 1},  {3, 3, 1, 1},  {7, 2, 1, 1},
                                                   {33, 6, 1, 1}, {8, 2, 4, 2},  {8, 2, 4, 2, GroupScore::max},
                                                   {12, 5, 3, 2}, {40, 8, 8, 4}, {40, 8, 8, 4, GroupScore::max},
                                                   {5, 2, 5, 3}};

template <class Check>
void for_every_rule(const RouteCase& c, const Check& check) {
  for (const ScoreFunction function : kScoreFunctions) {
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

// Checks that large logits have finite weights and probabilities; route(rule, logits, top_k) returns them.
template <class T, class Run>
void expect_no_overflow(const Run& route) {
  Matrix<T> logits(2, 3);
  for (int64_t e = 0; e < 3; ++e) {
    logits.element(0, e) = static_cast<T>(1e4) * static_cast<T>(e - 1);
    logits.element(1, e) = static_cast<T>(-1e4) - static_cast<T>(e);
  }
  for (const ScoreFunction function : kScoreFunctions) {
    const Routed<T> got = route(RoutingRule{function, Normalization::none, 1.0, 1, 1}, logits, 3);
    for (int64_t t = 0; t < 2; ++t) {
      for (int64_t k = 0; k < 3; ++k) {
        EXPECT_TRUE(std::isfinite(got.weights(t, k)) && std::isfinite(got.probabilities(t, k)))
            << static_cast<int>(function);
      }
    }
  }
}

}  // namespace maxmoe
