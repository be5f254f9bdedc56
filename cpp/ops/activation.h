// The activations of the experts through ATen. All functions but the last one are differentiable, any number of times.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <utility>

#include "kernels/experts/activation_kind.h"

namespace maxmoe::ops {

Activation parse_activation(const char* op, std::string_view name);

// Views of the gate and up columns of preactivations [R, 2F]. Without a gate the first one is undefined.
std::pair<at::Tensor, at::Tensor> gate_and_up(GateLayout layout, const at::Tensor& preactivations);

// f(gate) * up, or f(up) if gate is undefined.
at::Tensor activated_rows(const ActivationKind& kind, const at::Tensor& gate, const at::Tensor& up);

// Gate and up become their gradients, from `grad`, the gradient of activated_rows. Returns the activated rows if they
// are wanted.
at::Tensor activation_gradient(const ActivationKind& kind, const at::Tensor& grad, at::Tensor gate, at::Tensor up,
                               bool wants_activated);

}  // namespace maxmoe::ops
