// route through ATen: for other devices, and differentiable any number of times.
#pragma once

#include <tuple>

#include "kernels/routing/route.h"
#include "ops/checks.h"

namespace maxmoe::ops {

// weights [T, K], experts [T, K], probabilities [T, E]
using Routing = std::tuple<Tensor, Tensor, Tensor>;

// The experts of a token are kNotANumber if one of its scores is NaN.
Routing route_aten(const Tensor& logits, int64_t top_k, const OptionalTensor& correction_bias,
                   const OptionalTensor& given, const RoutingRule& rule);

// The weights of given experts [T, K]: scale * normalization(score(logits[t])[experts[t]]), 0 for a negative expert.
Tensor routing_weights_aten(const Tensor& logits, const Tensor& experts, const RoutingRule& rule);

// [T, E]: the scores of all experts, divided by their sum. For identity, the softmax of the logits.
Tensor probabilities_aten(const Tensor& logits, ScoreFunction function);

Tensor route_backward_aten(const Tensor& grad_weights, const OptionalTensor& grad_probabilities, const Tensor& logits,
                           const Tensor& experts, const RoutingRule& rule);

}  // namespace maxmoe::ops
