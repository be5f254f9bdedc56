// Tokens are routed one by one: the scores of a token stay in the first-level cache from the logits to the weights, and
// its result does not depend on the other tokens.
#include "kernels/routing/route.h"

#include <Eigen/Core>
#include <cmath>
#include <limits>

#include "kernels/matrix/row.simd.h"
#include "kernels/routing/top_k.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

template <class T>
using Row = Eigen::Map<Eigen::Array<T, Eigen::Dynamic, 1>>;
template <class T>
using ConstRow = Eigen::Map<const Eigen::Array<T, Eigen::Dynamic, 1>>;

template <class T>
T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

// Computes the scores of all experts. No finite logit overflows: softmax subtracts the largest logit; in sigmoid
// exp(-logit) = infinity gives 0; softplus is computed as max(x, 0) + log1p(exp(-|x|)).
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

// Whether a value is NaN. A NaN compares false with everything, so that its position alone would decide whether it is
// selected.
template <class T>
bool has_nan(const T* values, int64_t count) {
  auto is_nan = Vector<T>{} != Vector<T>{};
  int64_t i = 0;
  for (; i + kLanes<T> <= count; i += kLanes<T>) is_nan |= load_vector(values + i) != load_vector(values + i);
  bool any = false;
  for (int lane = 0; lane < kLanes<T>; ++lane) any |= is_nan[lane] != 0;
  for (; i < count; ++i) any |= values[i] != values[i];
  return any;
}

// The scratch slots of a token: for both passes, for the forward pass, and for the backward pass.
constexpr int kScoresScratch = 0;
constexpr int kBiasedScratch = 1, kWeightsScratch = 2, kGroupScoresScratch = 3, kGroupsScratch = 4;
constexpr int kProbabilitiesScratch = 1, kGradProbabilitiesScratch = 2, kSelectedScratch = 3, kGradScratch = 4;

// Scratch memory of one token. All arithmetic is done in it, because it is aligned. In unaligned memory Eigen computes
// the elements before the first aligned one with scalar functions, which round differently, and results must not depend
// on the address of a tensor.
template <class T>
struct TokenScratch {
  T* scores;                   // [E]
  T* biased;                   // [E], scores + correction_bias
  T* weights;                  // [K]
  T* group_scores;             // [num_groups]
  int64_t* groups;             // [top_k_groups], the best groups
  int64_t* group_is_selected;  // [num_groups], 0 or 1
};

// Selects K experts. If there are groups, only the experts of the best groups are candidates.
template <class T>
void select_experts(const Route<T>& a, int64_t token, const TokenScratch<T>& s) {
  const RoutingRule& rule = a.rule;
  TopK<T> experts(s.biased, a.experts.columns, a.experts.row(token));
  if (rule.num_groups == 1) return experts.add_range(0, a.logits.columns);
  const int64_t group_size = a.logits.columns / rule.num_groups;
  for (int64_t group = 0; group < rule.num_groups; ++group) {
    s.group_scores[group] = score_group(rule.group_score, s.biased + group * group_size, group_size);
  }
  TopK<T>(s.group_scores, rule.top_k_groups, s.groups).add_range(0, rule.num_groups);
  zero_row(s.group_is_selected, rule.num_groups);
  // Experts are added in ascending order, so that the lowest index wins a tie. TopK returns the groups in another
  // order.
  for (int64_t i = 0; i < rule.top_k_groups; ++i) s.group_is_selected[s.groups[i]] = 1;
  for (int64_t group = 0; group < rule.num_groups; ++group) {
    if (s.group_is_selected[group] != 0) experts.add_range(group * group_size, (group + 1) * group_size);
  }
}

// Normalizes the weights of a token. Slots without an expert have weight 0 and are left out of the softmax.
template <class T>
void normalize(const RoutingRule& rule, const int64_t* experts, Row<T> weights) {
  if (rule.normalization == Normalization::sum) weights /= weights.sum() + T(kSumEpsilon);
  if (rule.normalization != Normalization::softmax) return;
  // The largest logit is subtracted, so that exp does not overflow.
  T largest = -std::numeric_limits<T>::infinity();
  for (int64_t k = 0; k < weights.size(); ++k) {
    if (experts[k] >= 0) largest = std::fmax(largest, weights[k]);
  }
  weights = (weights - largest).exp().eval();
  for (int64_t k = 0; k < weights.size(); ++k) {
    if (experts[k] < 0) weights[k] = T(0);
  }
  const T sum = weights.sum();
  if (sum > T(0)) weights /= sum;
}

// Computes the probabilities: the scores of all experts, divided by their sum.
template <class T>
void normalize_scores(ScoreFunction function, ConstRow<T> logits, ConstRow<T> scores, Row<T> probabilities) {
  if (function == ScoreFunction::identity) return score_row<T>(ScoreFunction::softmax, logits, probabilities);
  probabilities = scores;
  if (function != ScoreFunction::softmax) probabilities /= scores.sum() + T(kSumEpsilon);
}

// Forward pass of one token: scores, probabilities, selection, weights.
template <class T>
void route_token(const Route<T>& a, int64_t token, const TokenScratch<T>& s) {
  const int64_t num_experts = a.logits.columns;
  const int64_t top_k = a.experts.columns;
  const ConstRow<T> logits(a.logits.row(token), num_experts);
  int64_t* experts = a.experts.row(token);
  const Row<T> scores(s.scores, num_experts);
  Row<T> biased(s.biased, num_experts);
  score_row<T>(a.rule.score_function, logits, scores);
  // `biased` is free until the scores are selected from it.
  normalize_scores<T>(a.rule.score_function, logits, ConstRow<T>(s.scores, num_experts), biased);
  copy_row(s.biased, a.probabilities.row(token), num_experts);
  biased = scores;
  if (a.correction_bias != nullptr) biased += ConstRow<T>(a.correction_bias, num_experts);
  if (has_nan(s.biased, num_experts)) {
    zero_row(a.weights.row(token), top_k);
    for (int64_t k = 0; k < top_k; ++k) experts[k] = kNotANumber;
    return;
  }
  if (a.given != nullptr) {
    copy_row(a.given + token * top_k, experts, top_k);
  } else {
    select_experts(a, token, s);
  }
  Row<T> weights(s.weights, top_k);
  for (int64_t k = 0; k < top_k; ++k) weights[k] = experts[k] >= 0 ? scores[experts[k]] : T(0);
  normalize<T>(a.rule, experts, weights);
  weights *= T(a.rule.scale);
  copy_row(s.weights, a.weights.row(token), top_k);
}

// Backward of normalize: `grad` is the gradient of the weights before the call, and the gradient of the K selected
// scores after it.
template <class T>
void normalize_backward(const RoutingRule& rule, const int64_t* experts, ConstRow<T> selected, Row<T> grad) {
  grad *= T(rule.scale);
  if (rule.normalization == Normalization::none) return;
  if (rule.normalization == Normalization::sum) {
    // With w = s / total: ds = (dw - <dw, w>) / total. A constant added to all dw changes ds only by its product with
    // the epsilon, because the weights sum to one. The common part of dw is therefore subtracted first. Otherwise its
    // rounding error would be divided by a total that may be small.
    const T total = selected.sum() + T(kSumEpsilon);
    Eigen::Index largest = 0;
    selected.abs().maxCoeff(&largest);
    const T common = grad[largest];
    grad -= common;
    grad = ((grad - (grad * selected).sum() / total + common * (T(kSumEpsilon) / total)) / total).eval();
    return;
  }
  // With w = softmax(s): ds = w * (dw - <dw, w>). The weights w are recomputed, not saved.
  Eigen::Array<T, Eigen::Dynamic, 1> softmax = selected;
  normalize<T>({rule.score_function, Normalization::softmax, 1.0, 1, 1}, experts,
               Row<T>(softmax.data(), softmax.size()));
  grad = (softmax * (grad - (grad * softmax).sum())).eval();
}

// Derivative of a score with respect to its logit, for the elementwise score functions.
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

// Scratch memory of one token in the backward pass.
template <class T>
struct BackwardScratch {
  T* scores;              // [E]
  T* probabilities;       // [E]
  T* grad_probabilities;  // [E]
  T* selected;            // [K]
  T* grad;                // [K]
};

// Computes the gradient of the logits that comes through the probabilities.
template <class T>
void probabilities_backward(ScoreFunction function, ConstRow<T> logits, ConstRow<T> scores, ConstRow<T> grad,
                            Row<T> probabilities, Row<T> grad_logits) {
  // With p = s / sum(s): ds = (dp - <dp, p>) / sum(s). With p = softmax(l): dl = p * (dp - <dp, p>).
  normalize_scores<T>(function, logits, scores, probabilities);
  grad_logits = grad - (grad * probabilities).sum();
  if (function == ScoreFunction::softmax || function == ScoreFunction::identity) {
    grad_logits *= probabilities;
    return;
  }
  grad_logits /= scores.sum() + T(kSumEpsilon);
  for (int64_t e = 0; e < logits.size(); ++e) grad_logits[e] *= score_slope(function, logits[e], scores[e]);
}

// Backward pass of one token. A slot without an expert has no gradient.
template <class T>
void route_token_backward(const RouteBackward<T>& a, int64_t token, const BackwardScratch<T>& s) {
  const int64_t num_experts = a.logits.columns;
  const int64_t top_k = a.experts.columns;
  const int64_t* experts = a.experts.row(token);
  const ScoreFunction function = a.rule.score_function;
  const ConstRow<T> logits(a.logits.row(token), num_experts);
  const ConstRow<T> scores(s.scores, num_experts);
  const ConstRow<T> selected(s.selected, top_k);
  Row<T> grad(s.grad, top_k);
  Row<T> grad_logits(a.grad_logits.row(token), num_experts);

  score_row<T>(function, logits, Row<T>(s.scores, num_experts));
  for (int64_t k = 0; k < top_k; ++k) {
    s.selected[k] = experts[k] >= 0 ? s.scores[experts[k]] : T(0);
    s.grad[k] = experts[k] >= 0 ? a.grad_weights.row(token)[k] : T(0);
  }
  normalize_backward<T>(a.rule, experts, selected, grad);
  for (int64_t k = 0; k < top_k; ++k) {
    if (experts[k] < 0) s.grad[k] = T(0);
  }

  if (a.grad_probabilities.rows > 0) {
    copy_row(a.grad_probabilities.row(token), s.grad_probabilities, num_experts);
    probabilities_backward<T>(function, logits, scores, ConstRow<T>(s.grad_probabilities, num_experts),
                              Row<T>(s.probabilities, num_experts), grad_logits);
  } else {
    grad_logits.setZero();
  }
  // In softmax every logit has a gradient through the sum; the selected ones have a second term, below.
  if (function == ScoreFunction::softmax) grad_logits -= (grad * selected).sum() * scores;
  for (int64_t k = 0; k < top_k; ++k) {
    if (experts[k] < 0) continue;
    const T slope =
        function == ScoreFunction::softmax ? selected[k] : score_slope(function, logits[experts[k]], selected[k]);
    grad_logits[experts[k]] += grad[k] * slope;
  }
}

}  // namespace

template <class T>
void route(const Route<T>& a, const Executor& executor) {
  const int64_t num_experts = a.logits.columns;
  run_ranges(executor, a.logits.rows, rows_per_task(num_experts), [&](int64_t begin, int64_t end) {
    auto* groups = scratch<int64_t>(kGroupsScratch, 2 * a.rule.num_groups);
    const TokenScratch<T> s{scratch<T>(kScoresScratch, num_experts),
                            scratch<T>(kBiasedScratch, num_experts),
                            scratch<T>(kWeightsScratch, a.experts.columns),
                            scratch<T>(kGroupScoresScratch, a.rule.num_groups),
                            groups,
                            groups + a.rule.num_groups};
    for (int64_t token = begin; token < end; ++token) route_token(a, token, s);
  });
}

template <class T>
void route_backward(const RouteBackward<T>& a, const Executor& executor) {
  const int64_t num_experts = a.logits.columns;
  run_ranges(executor, a.logits.rows, rows_per_task(num_experts), [&](int64_t begin, int64_t end) {
    const BackwardScratch<T> s{scratch<T>(kScoresScratch, num_experts), scratch<T>(kProbabilitiesScratch, num_experts),
                               scratch<T>(kGradProbabilitiesScratch, num_experts),
                               scratch<T>(kSelectedScratch, a.experts.columns),
                               scratch<T>(kGradScratch, a.experts.columns)};
    for (int64_t token = begin; token < end; ++token) route_token_backward(a, token, s);
  });
}

template <class T>
void router_entropy(const RouterEntropy<T>& a, const Executor& executor) {
  const int64_t num_tokens = a.probabilities.rows;
  const int64_t num_experts = a.probabilities.columns;
  const int64_t grain = rows_per_task(num_experts);
  // One sum for each range of tokens, so that their order does not depend on the threads.
  auto* const sums = scratch<double>(kWorkListScratch, num_tokens / grain + 1);
  run_ranges(executor, num_tokens, grain, [&](int64_t begin, int64_t end) {
    auto* const row = scratch<T>(kProbabilitiesScratch, num_experts);
    const ConstRow<T> p(row, num_experts);
    double sum = 0;
    for (int64_t token = begin; token < end; ++token) {
      copy_row(a.probabilities.row(token), row, num_experts);
      sum -= static_cast<double>((p * p.max(std::numeric_limits<T>::min()).log()).sum());
    }
    sums[begin / grain] = sum;
  });
  double total = 0;
  for (int64_t begin = 0; begin < num_tokens; begin += grain) total += sums[begin / grain];
  a.out[0] = static_cast<T>(total) / static_cast<T>(a.divisor);
}

template void route<float>(const Route<float>&, const Executor&);
template void route<double>(const Route<double>&, const Executor&);
template void route_backward<float>(const RouteBackward<float>&, const Executor&);
template void route_backward<double>(const RouteBackward<double>&, const Executor&);
template void router_entropy<float>(const RouterEntropy<float>&, const Executor&);
template void router_entropy<double>(const RouterEntropy<double>&, const Executor&);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
