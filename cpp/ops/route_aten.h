// route in ATen's operators: for other devices, and differentiable any number of times.
#pragma once

#include <tuple>

#include "kernels/route.h"
#include "ops/checks.h"

namespace maxmoe::ops {

using Routing = std::tuple<Tensor, Tensor>;

// weights [T, K] and experts [T, K]; expert -1 for a token whose scores are not numbers.
Routing route_aten(const Tensor& logits, int64_t top_k, const OptionalTensor& correction_bias, const RoutingRule& rule);

// The weights of experts [T, K] that are known: scale * normalization(score(logits[t])[experts[t]]).
Tensor routing_weights_aten(const Tensor& logits, const Tensor& experts, const RoutingRule& rule);

Tensor route_backward_aten(const Tensor& grad_weights, const Tensor& logits, const Tensor& experts,
                           const RoutingRule& rule);

}  // namespace maxmoe::ops
