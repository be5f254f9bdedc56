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

// Added to the sum of Normalization::sum, so that scores that are all zero do not give NaN; the value is DeepSeek-V3's.
constexpr double kSumEpsilon = 1e-20;

template <class T>
T sigmoid(T x) {
  return T(1) / (T(1) + std::exp(-x));
}

// No finite logit overflows: softmax subtracts the largest one; exp(-logit) = infinity makes a sigmoid 0; softplus is
// written as max(x, 0) + log1p(exp(-|x|)).
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

// The indices of the `count` largest of `keys`, by insertion into a sorted list: largest first, and the lowest index
// first among equals as long as ranges are added in ascending order. Most keys fail the first comparison.
template <class T>
class TopK {
 public:
  TopK(const T* keys, int64_t count, int64_t* selected) : keys_(keys), count_(count), selected_(selected) {}

  void add_range(int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (filled_ == count_ && !(keys_[i] > keys_[selected_[count_ - 1]])) continue;
      int64_t place = filled_ < count_ ? filled_++ : count_ - 1;
      for (; place > 0 && keys_[i] > keys_[selected_[place - 1]]; --place) selected_[place] = selected_[place - 1];
      selected_[place] = i;
    }
  }

 private:
  const T* keys_;
  int64_t count_;
  int64_t* selected_;
  int64_t filled_ = 0;
};

template <class T>
MAXMOE_INLINE Vector<T> lanewise_max(Vector<T> a, Vector<T> b) {
  return a < b ? b : a;
}

template <class T>
MAXMOE_INLINE Vector<T> lanewise_min(Vector<T> a, Vector<T> b) {
  return b < a ? b : a;
}

// vector[(lane + distance) % kLanes]
template <class T>
MAXMOE_INLINE Vector<T> rotated(Vector<T> vector, int distance) {
  Vector<T> result;
  for (int lane = 0; lane < kLanes<T>; ++lane) result[lane] = vector[(lane + distance) % kLanes<T>];
  return result;
}

// The largest of a group's biased scores, or the sum of its two largest. In vectors and without branches, which would
// be mispredicted: the order of the scores is random.
template <class T>
T score_group(GroupScore group_score, const T* biased, int64_t group_size) {
  const Vector<T> lowest = Vector<T>{} - std::numeric_limits<T>::infinity();
  Vector<T> best = lowest;
  Vector<T> second = lowest;
  const auto add = [&](Vector<T> values) {
    second = lanewise_max<T>(second, lanewise_min<T>(values, best));
    best = lanewise_max<T>(best, values);
  };
  int64_t i = 0;
  for (; i + kLanes<T> <= group_size; i += kLanes<T>) add(load_vector(biased + i));
  Vector<T> rest = lowest;
  for (int64_t lane = 0; i + lane < group_size; ++lane) rest[lane] = biased[i + lane];
  add(rest);
  // Each step merges the two best of a lane with those of the lane `distance` further on, which come from other scores.
  // In the end every lane holds the two best of all.
#pragma GCC unroll 4
  for (int distance = kLanes<T> / 2; distance > 0; distance /= 2) {
    const Vector<T> other = rotated<T>(best, distance);
    second = lanewise_max<T>(lanewise_min<T>(best, other), lanewise_max<T>(second, rotated<T>(second, distance)));
    best = lanewise_max<T>(best, other);
  }
  return group_score == GroupScore::top2 && group_size > 1 ? best[0] + second[0] : best[0];
}

// A NaN compares false with everything: whether it is selected would depend on its position alone.
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

// Scratch memory of one token. All arithmetic is done here, in memory that is aligned: Eigen computes the elements
// before the first aligned one with scalar functions, which round differently, and results must not depend on the
// address of a tensor.
template <class T>
struct TokenScratch {
  T* scores;
  T* biased;
  T* weights;
  T* group_scores;
  int64_t* groups;
  int64_t* group_is_selected;
};

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
  for (int64_t i = 0; i < rule.top_k_groups; ++i) s.group_is_selected[s.groups[i]] = 1;
  for (int64_t group = 0; group < rule.num_groups; ++group) {
    if (s.group_is_selected[group] != 0) experts.add_range(group * group_size, (group + 1) * group_size);
  }
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
  if (has_nan(s.biased, num_experts)) {
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

// Backward of normalize: turns `grad` from the gradient of the weights into that of the K selected scores.
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

// d score / d logit, for the elementwise score functions
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
  Row<T> selected(selected_scratch, top_k);
  Row<T> grad(grad_scratch, top_k);
  Row<T> grad_logits(a.grad_logits.row(token), num_experts);

  const bool is_softmax = a.rule.score_function == ScoreFunction::softmax;  // the others are elementwise
  if (is_softmax) score_row<T>(a.rule.score_function, ConstRow<T>(a.logits.row(token), num_experts), scores);
  for (int64_t k = 0; k < top_k; ++k) {
    selected_scratch[k] = is_softmax ? scores[experts[k]] : a.logits.row(token)[experts[k]];
    grad[k] = a.grad_weights.row(token)[k];
  }
  if (!is_softmax) score_row<T>(a.rule.score_function, ConstRow<T>(selected_scratch, top_k), selected);
  normalize_backward<T>(a.rule, ConstRow<T>(selected_scratch, top_k), grad);

  if (is_softmax) {
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
