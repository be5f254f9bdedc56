// Routing: scores of the experts, the top K of each token, and their weights.
#pragma once

#include "executor.h"
#include "matrix_view.h"

namespace maxmoe {

enum class ScoreFunction { softmax, sigmoid, sqrtsoftplus, identity };
enum class Normalization { none, sum, softmax };
enum class GroupScore { top2, max };  // the sum of a group's two best experts, or its best one

// How a token's experts are selected, and how their scores become weights.
struct RoutingRule {
  ScoreFunction score_function;
  Normalization normalization;
  double scale;
  int64_t num_groups;
  int64_t top_k_groups;
  GroupScore group_score = GroupScore::top2;
};

// weights[t] = scale * normalization(score(logits[t])[experts[t]]), where experts[t] are the K best of
// score + correction_bias among the best groups, best first, the lowest index first among equals. A token whose scores
// are not all numbers gets experts -1.
template <class T>
struct Route {
  ConstMatrixView<T> logits;  // [T, E]
  const T* correction_bias;   // [E] or null
  RoutingRule rule;
  MatrixView<T> weights;        // [T, K]
  MatrixView<int64_t> experts;  // [T, K]
};

template <class T>
struct RouteBackward {
  ConstMatrixView<T> grad_weights;   // [T, K]
  ConstMatrixView<T> logits;         // [T, E]
  ConstMatrixView<int64_t> experts;  // [T, K]
  RoutingRule rule;
  MatrixView<T> grad_logits;  // [T, E]
};

}  // namespace maxmoe

MAXMOE_KERNEL(route, Route)
MAXMOE_KERNEL(route_backward, RouteBackward)
