// route in ATen's operators: for other devices, and differentiable any number of times.
#pragma once

#include <tuple>

#include "kernels/route.h"
#include "ops/checks.h"

namespace maxmoe::ops {

// weights [T, K], experts [T, K], probabilities [T, E]
using Routing = std::tuple<Tensor, Tensor, Tensor>;

// Experts are kNotANumber for a token whose scores are not numbers.
Routing route_aten(const Tensor& logits, int64_t top_k, const OptionalTensor& correction_bias,
                   const OptionalTensor& given, const RoutingRule& rule);

// The weights of experts [T, K] that are known, 0 for those that are negative:
// scale * normalization(score(logits[t])[experts[t]]).
Tensor routing_weights_aten(const Tensor& logits, const Tensor& experts, const RoutingRule& rule);

// The scores of all experts, scaled to sum one; for identity the softmax of the logits.
Tensor probabilities_aten(const Tensor& logits, ScoreFunction function);

Tensor route_backward_aten(const Tensor& grad_weights, const OptionalTensor& grad_probabilities, const Tensor& logits,
                           const Tensor& experts, const RoutingRule& rule);

}  // namespace maxmoe::ops
