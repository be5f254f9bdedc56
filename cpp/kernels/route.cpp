#include "route.h"

#include <Eigen/Core>
#include <cmath>
#include <limits>

#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

template <class T>
using Row = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;
template <class T>
using ConstRow = Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>>;

constexpr double kSumEpsilon = 1e-20;  // of "sum", as DeepSeek-V3 has it

template <class T>
T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

// Each without overflow for any logit.
template <class T>
void score_row(ScoreFunction function, ConstRow<T> logits, Row<T> scores) {
  switch (function) {
    case ScoreFunction::softmax:
      scores = (logits - logits.maxCoeff()).exp();
      scores /= scores.sum();
      return;
    case ScoreFunction::sigmoid:
      scores = (T(1) + (-logits).exp()).inverse();
      return;
    case ScoreFunction::sqrtsoftplus:
      scores = logits.unaryExpr([](T x) { return std::sqrt(std::fmax(x, T(0)) + std::log1p(std::exp(-std::abs(x)))); });
      return;
    case ScoreFunction::identity:
      scores = logits;
      return;
  }
}

// The `count` largest of `keys` among the allowed indices, largest first; an earlier index wins a tie.
template <class T, class Allowed>
void select_largest(const T* keys, int64_t size, const Allowed& allowed, int64_t count, int64_t* selected) {
  int64_t filled = 0;
  for (int64_t i = 0; i < size; ++i) {
    if (!allowed(i)) continue;
    if (filled == count && !(keys[i] > keys[selected[count - 1]])) continue;
    int64_t place = filled < count ? filled++ : count - 1;
    for (; place > 0 && keys[i] > keys[selected[place - 1]]; --place) selected[place] = selected[place - 1];
    selected[place] = i;
  }
}

// A group is as good as the sum of its two best experts.
template <class T>
void score_groups(const T* biased, int64_t num_groups, int64_t group_size, T* group_scores) {
  for (int64_t group = 0; group < num_groups; ++group) {
    T best = -std::numeric_limits<T>::infinity();
    T second = best;
    for (int64_t i = group * group_size; i < (group + 1) * group_size; ++i) {
      second = biased[i] > best ? best : (biased[i] > second ? biased[i] : second);
      best = biased[i] > best ? biased[i] : best;
    }
    group_scores[group] = group_size > 1 ? best + second : best;
  }
}

// Scratch memory of one token. All arithmetic happens here, on aligned memory: Eigen treats the unaligned ends of a
// row differently, and results must not depend on where a tensor begins.
template <class T>
struct TokenScratch {
  T* scores;
  T* biased;
  T* weights;
  T* group_scores;
  int64_t* groups;
  int64_t* is_open;
};

template <class T>
void select_experts(const Route<T>& a, int64_t token, const TokenScratch<T>& s) {
  const int64_t num_experts = a.logits.columns;
  const int64_t top_k = a.experts.columns;
  if (a.rule.num_groups == 1) {
    return select_largest(s.biased, num_experts, [](int64_t) { return true; }, top_k, a.experts.row(token));
  }
  const int64_t group_size = num_experts / a.rule.num_groups;
  score_groups(s.biased, a.rule.num_groups, group_size, s.group_scores);
  select_largest(s.group_scores, a.rule.num_groups, [](int64_t) { return true; }, a.rule.top_k_groups, s.groups);
  zero_row(s.is_open, a.rule.num_groups);
  for (int64_t i = 0; i < a.rule.top_k_groups; ++i) s.is_open[s.groups[i]] = 1;
  const auto allowed = [&](int64_t expert) { return s.is_open[expert / group_size] != 0; };
  select_largest(s.biased, num_experts, allowed, top_k, a.experts.row(token));
}

template <class T>
void normalize(const RoutingRule& rule, Row<T> weights) {
  if (rule.normalization == Normalization::sum) weights /= weights.sum() + T(kSumEpsilon);
  if (rule.normalization == Normalization::softmax) {
    weights = (weights - weights.maxCoeff()).exp().eval();
    weights /= weights.sum();
  }
}

template <class T>
void route_token(const Route<T>& a, int64_t token, const TokenScratch<T>& s) {
  const int64_t num_experts = a.logits.columns;
  const int64_t top_k = a.experts.columns;
  const Row<T> scores(s.scores, num_experts);
  Row<T> biased(s.biased, num_experts);
  score_row<T>(a.rule.score_function, ConstRow<T>(a.logits.row(token), num_experts), scores);
  biased = scores;
  if (a.correction_bias != nullptr) biased += ConstRow<T>(a.correction_bias, num_experts);
  Row<T> weights(s.weights, top_k);
  if (!(biased == biased).all()) {
    zero_row(a.weights.row(token), top_k);
    for (int64_t k = 0; k < top_k; ++k) a.experts.row(token)[k] = -1;
    return;
  }
  select_experts(a, token, s);
  for (int64_t k = 0; k < top_k; ++k) weights[k] = scores[a.experts.row(token)[k]];
  normalize<T>(a.rule, weights);
  weights *= T(a.rule.scale);
  copy_row(s.weights, a.weights.row(token), top_k);
}

// The gradient of the normalised weights, from that of the K selected scores on: grad becomes d/dscore.
template <class T>
void normalize_backward(const RoutingRule& rule, ConstRow<T> selected, Row<T> grad) {
  grad *= T(rule.scale);
  if (rule.normalization == Normalization::none) return;
  if (rule.normalization == Normalization::sum) {
    const T total = selected.sum() + T(kSumEpsilon);
    grad = ((grad - (grad * selected).sum() / total) / total).eval();
    return;
  }
  const Eigen::Array<T, Eigen::Dynamic, 1> shifted = (selected - selected.maxCoeff()).exp();
  const Eigen::Array<T, Eigen::Dynamic, 1> softmax = shifted / shifted.sum();
  grad = (softmax * (grad - (grad * softmax).sum())).eval();
}

// d score / d logit, for the functions that work on each logit by itself
template <class T>
T score_slope(ScoreFunction function, T logit, T score) {
  switch (function) {
    case ScoreFunction::sigmoid:
      return score * (T(1) - score);
    case ScoreFunction::sqrtsoftplus:
      return score > T(0) ? sigmoid(logit) / (T(2) * score) : T(0);
    default:
      return T(1);
  }
}

template <class T>
void route_token_backward(const RouteBackward<T>& a, int64_t token, T* score_scratch, T* selected_scratch,
                          T* grad_scratch) {
  const int64_t num_experts = a.logits.columns;
  const int64_t top_k = a.experts.columns;
  const int64_t* experts = a.experts.row(token);
  const Row<T> scores(score_scratch, num_experts);
  const Row<T> selected(selected_scratch, top_k);
  Row<T> grad(grad_scratch, top_k);
  Row<T> grad_logits(a.grad_logits.row(token), num_experts);

  score_row<T>(a.rule.score_function, ConstRow<T>(a.logits.row(token), num_experts), scores);
  for (int64_t k = 0; k < top_k; ++k) {
    selected_scratch[k] = scores[experts[k]];
    grad[k] = a.grad_weights.row(token)[k];
  }
  normalize_backward<T>(a.rule, ConstRow<T>(selected_scratch, top_k), grad);

  if (a.rule.score_function == ScoreFunction::softmax) {
    grad_logits = -(grad * selected).sum() * scores;
    for (int64_t k = 0; k < top_k; ++k) grad_logits[experts[k]] += grad[k] * selected[k];
    return;
  }
  grad_logits.setZero();
  for (int64_t k = 0; k < top_k; ++k) {
    grad_logits[experts[k]] +=
        grad[k] * score_slope(a.rule.score_function, a.logits.row(token)[experts[k]], selected[k]);
  }
}

}  // namespace

template <class T>
void route(const Route<T>& a, const Executor& executor) {
  const int64_t num_experts = a.logits.columns;
  run_ranges(executor, a.logits.rows, rows_per_task(num_experts), [&](int64_t begin, int64_t end) {
    auto* groups = scratch<int64_t>(4, 2 * a.rule.num_groups);
    const TokenScratch<T> s{scratch<T>(0, num_experts),
                            scratch<T>(1, num_experts),
                            scratch<T>(2, a.experts.columns),
                            scratch<T>(3, a.rule.num_groups),
                            groups,
                            groups + a.rule.num_groups};
    for (int64_t token = begin; token < end; ++token) route_token(a, token, s);
  });
}

template <class T>
void route_backward(const RouteBackward<T>& a, const Executor& executor) {
  const int64_t num_experts = a.logits.columns;
  run_ranges(executor, a.logits.rows, rows_per_task(num_experts), [&](int64_t begin, int64_t end) {
    auto* score_scratch = scratch<T>(0, num_experts);
    auto* selected_scratch = scratch<T>(1, a.experts.columns);
    auto* grad_scratch = scratch<T>(2, a.experts.columns);
    for (int64_t token = begin; token < end; ++token) {
      route_token_backward(a, token, score_scratch, selected_scratch, grad_scratch);
    }
  });
}

template void route<float>(const Route<float>&, const Executor&);
template void route<double>(const Route<double>&, const Executor&);
template void route_backward<float>(const RouteBackward<float>&, const Executor&);
template void route_backward<double>(const RouteBackward<double>&, const Executor&);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
