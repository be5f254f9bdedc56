// Routing: scores of the experts, the top K of each token, and their weights.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/matrix_view.h"

namespace maxmoe {

enum class ScoreFunction { softmax, sigmoid, sqrtsoftplus, identity };
enum class Normalization { none, sum, softmax };
enum class GroupScore { top2, max };  // the sum of the two largest scores of a group, or the largest

// How the experts of a token are selected, and how their scores become weights.
struct RoutingRule {
  ScoreFunction score_function;
  Normalization normalization;
  double scale;
  int64_t num_groups;
  int64_t top_k_groups;
  GroupScore group_score = GroupScore::top2;
};

// Added to the sum of the scores in Normalization::sum and of the probabilities, so that scores that are all zero do
// not give NaN. DeepSeek-V3 has the same value.
constexpr double kSumEpsilon = 1e-20;

// The value of all experts of a token that has a NaN among its scores.
constexpr int64_t kNotANumber = -2;

// weights[t] = scale * normalization(score(logits[t])[experts[t]]). experts[t] are the K largest of score +
// correction_bias in the best groups: largest first, and the lowest index first among equals. If `given` is not null,
// they are the experts in `given`; a slot of -1 has no expert and weight 0. probabilities[t] = score(logits[t]) / (sum
// of the scores + 1e-20), for identity the softmax of the logits.
template <class T>
struct Route {
  ConstMatrixView<T> logits;  // [T, E]
  const T* correction_bias;   // [E] or null
  const int64_t* given;       // [T, K] or null: experts are selected
  RoutingRule rule;
  MatrixView<T> weights;        // [T, K]
  MatrixView<int64_t> experts;  // [T, K]
  MatrixView<T> probabilities;  // [T, E]
};

// sum_{t, e} -p[t, e] log(p[t, e]) / divisor, where p = 0 adds 0.
template <class T>
struct RouterEntropy {
  ConstMatrixView<T> probabilities;  // [T, E]
  int64_t divisor;
  T* out;  // [1]
};

// The gradient of the logits, for fixed experts. The scores are recomputed from the logits.
template <class T>
struct RouteBackward {
  ConstMatrixView<T> grad_weights;        // [T, K]
  ConstMatrixView<T> grad_probabilities;  // [T, E], or empty for zero
  ConstMatrixView<T> logits;              // [T, E]
  ConstMatrixView<int64_t> experts;       // [T, K]
  RoutingRule rule;
  MatrixView<T> grad_logits;  // [T, E]
};

}  // namespace maxmoe

MAXMOE_KERNEL(route, Route)
MAXMOE_KERNEL(route_backward, RouteBackward)
MAXMOE_KERNEL(router_entropy, RouterEntropy)
