#include "ops/route_aten.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>

#include "ops/torch_internals.h"

namespace maxmoe::ops {
namespace {

constexpr double kSumEpsilon = 1e-20;

// sqrt(softplus(x)). Where softplus underflows to 0, the derivative is set to 0, because the derivative of the square
// root is infinite there and would give NaN.
Tensor sqrt_softplus(const Tensor& logits) {
  constexpr double threshold = 40;  // softplus(x) = x from here on, in float64
  const Tensor softplus = at::softplus(logits, /*beta=*/1, threshold);
  const Tensor is_zero = softplus.eq(0);
  const Tensor zero = at::zeros({}, logits.options());
  return at::where(is_zero, zero, at::where(is_zero, zero + 1, softplus).sqrt());
}

Tensor score(const Tensor& logits, ScoreFunction function) {
  switch (function) {
    case ScoreFunction::softmax:
      return at::softmax(logits, 1);
    case ScoreFunction::sigmoid:
      return logits.sigmoid();
    case ScoreFunction::sqrtsoftplus:
      return sqrt_softplus(logits);
    case ScoreFunction::identity:
      return logits;
  }
  return logits;
}

// Normalizes the selected scores [T, K]. Slots without an expert are left out; `is_absent` is undefined without any.
Tensor normalize(const Tensor& selected, const Tensor& is_absent, Normalization normalization) {
  const auto present = [&](double left_out) {
    return is_absent.defined() ? selected.masked_fill(is_absent, left_out) : selected;
  };
  if (normalization == Normalization::sum) {
    const Tensor scores = present(0);
    return scores / (scores.sum(1, true) + kSumEpsilon);
  }
  // Not minus infinity, because the softmax of a token without any expert would be NaN.
  if (normalization == Normalization::softmax) return at::softmax(present(std::numeric_limits<float>::lowest()), 1);
  return selected;
}

Tensor scaled(const Tensor& weights, const RoutingRule& rule) {
  return rule.scale == 1 ? weights : weights * rule.scale;
}

Tensor weigh(const Tensor& scores, const Tensor& experts, const RoutingRule& rule) {
  const Tensor is_absent = experts.lt(0);
  const Tensor selected = scores.gather(1, experts.clamp_min(0));
  return scaled(normalize(selected, is_absent, rule.normalization), rule).masked_fill(is_absent, 0);
}

// Indices in descending order of the keys. Stable: among equal keys the lowest index comes first.
Tensor order_of(const Tensor& keys) {
  return keys.argsort(/*stable=*/true, 1, /*descending=*/true);
}

// Experts in descending order of the biased score. Experts outside of the best groups come last.
Tensor expert_order(const Tensor& biased, const RoutingRule& rule) {
  const Tensor order = order_of(biased);
  if (rule.num_groups == 1) return order;
  const int64_t group_size = biased.size(1) / rule.num_groups;
  const Tensor by_group = biased.view({-1, rule.num_groups, group_size});
  const int64_t counted = rule.group_score == GroupScore::top2 ? 2 : 1;
  const Tensor group_scores = std::get<0>(by_group.topk(std::min<int64_t>(counted, group_size), 2)).sum(2);
  const Tensor groups = order_of(group_scores).narrow(1, 0, rule.top_k_groups);
  const Tensor is_open = at::zeros_like(group_scores).scatter(1, groups, 1).repeat_interleave(group_size, 1);
  return order.gather(1, order_of(is_open.gather(1, order)));
}

// The derivative of the elementwise score functions; 0 where the score underflows to 0.
Tensor score_slope(const Tensor& logits, const Tensor& scores, ScoreFunction function) {
  if (function == ScoreFunction::sigmoid) return scores * (1 - scores);
  const Tensor zero = at::zeros({}, scores.options());
  const Tensor is_positive = scores.gt(0);
  return at::where(is_positive, logits.sigmoid() / (2 * at::where(is_positive, scores, zero + 1)), zero);
}

// The scores of all experts, divided by their sum; for identity the softmax of the logits.
Tensor probabilities_of(const Tensor& logits, const Tensor& scores, ScoreFunction function) {
  if (function == ScoreFunction::softmax) return scores;
  if (function == ScoreFunction::identity) return at::softmax(logits, 1);
  return scores / (scores.sum(1, true) + kSumEpsilon);
}

}  // namespace

Tensor routing_weights_aten(const Tensor& logits, const Tensor& experts, const RoutingRule& rule) {
  return weigh(score(logits, rule.score_function), experts, rule);
}

Tensor probabilities_aten(const Tensor& logits, ScoreFunction function) {
  return probabilities_of(logits, score(logits, function), function);
}

Routing route_aten(const Tensor& logits, int64_t top_k, const OptionalTensor& correction_bias,
                   const OptionalTensor& given, const RoutingRule& rule) {
  const Tensor scores = score(logits, rule.score_function);
  const Tensor biased = correction_bias.has_value() ? scores + *correction_bias : scores;
  const Tensor chosen = given.has_value() ? *given : expert_order(biased, rule).narrow(1, 0, top_k);
  const Tensor is_nan = biased.isnan().any(1, true);
  const Tensor experts = chosen.masked_fill(is_nan, kNotANumber);
  const Tensor weights = given.has_value()
                             ? weigh(scores, experts, rule)
                             : scaled(normalize(scores.gather(1, chosen), Tensor(), rule.normalization), rule);
  return {weights, experts, probabilities_of(logits, scores, rule.score_function)};
}

Tensor route_backward_aten(const Tensor& grad_weights, const OptionalTensor& grad_probabilities, const Tensor& logits,
                           const Tensor& experts, const RoutingRule& rule) {
  const Tensor scores = score(logits, rule.score_function);
  const Tensor is_absent = experts.lt(0);
  const Tensor index = experts.clamp_min(0);
  const Tensor selected = scores.gather(1, index).masked_fill(is_absent, 0);
  Tensor grad = scaled(grad_weights.masked_fill(is_absent, 0), rule);
  if (rule.normalization == Normalization::sum) {
    const Tensor total = selected.sum(1, true) + kSumEpsilon;
    // The gradient of the largest score is subtracted first, see kernels/route.cpp. Scores other than logits are
    // positive.
    const Tensor size = rule.score_function == ScoreFunction::identity ? selected.abs() : selected;
    const Tensor common = grad.gather(1, size.argmax(1, true));
    grad = grad - common;
    grad = (grad - (grad * selected).sum(1, true).sub(common, kSumEpsilon) / total) / total;
  } else if (rule.normalization == Normalization::softmax) {
    const Tensor softmax = normalize(selected, is_absent, rule.normalization);
    grad = softmax * (grad - (grad * softmax).sum(1, true));
  }
  grad = grad.masked_fill(is_absent, 0);
  Tensor grad_scores = at::zeros_like(scores).scatter_add(1, index, grad);
  Tensor through_softmax;  // the part of the gradient that does not pass through the scores, for softmax and identity
  if (grad_probabilities.has_value()) {
    const Tensor probabilities = probabilities_of(logits, scores, rule.score_function);
    const Tensor centered = *grad_probabilities - (*grad_probabilities * probabilities).sum(1, true);
    if (rule.score_function == ScoreFunction::softmax || rule.score_function == ScoreFunction::identity) {
      through_softmax = probabilities * centered;
    } else {
      grad_scores = grad_scores + centered / (scores.sum(1, true) + kSumEpsilon);
    }
  }
  Tensor grad_logits = grad_scores;
  if (rule.score_function == ScoreFunction::softmax) {
    grad_logits = torch_internals::softmax_backward(grad_scores, scores);
  } else if (rule.score_function != ScoreFunction::identity) {
    grad_logits = grad_scores * score_slope(logits, scores, rule.score_function);
  }
  return through_softmax.defined() ? grad_logits + through_softmax : grad_logits;
}

}  // namespace maxmoe::ops
