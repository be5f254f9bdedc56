// The experts' activations through ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>
#include <utility>

#include "kernels/activation_kind.h"

namespace maxmoe::ops {

Activation parse_activation(const char* op, std::string_view name);

// The two parts of preactivations [R, 2F], and the whole again; without a gate, the first part is undefined.
std::pair<at::Tensor, at::Tensor> gate_and_up(GateLayout layout, const at::Tensor& preactivations);
at::Tensor preactivations_of(GateLayout layout, const at::Tensor& gate, const at::Tensor& up);

// f(gate) * up, new memory, in the dtype of the two. gate is undefined when the experts are not gated.
at::Tensor activated_rows(const ActivationKind& kind, const at::Tensor& gate, const at::Tensor& up);

// Writes the gradients of gate and up over them, given that of f(gate) * up, whose memory it uses.
void overwrite_with_gradient(const ActivationKind& kind, const at::Tensor& grad_activated, const at::Tensor& gate,
                             const at::Tensor& up);

// The same, differentiable: f(gate) * up, and its slopes in gate and up, in the accumulator's type.
struct ActivatedTensors {
  at::Tensor activated;
  at::Tensor gate_slope;
  at::Tensor up_slope;
};
ActivatedTensors activate(const ActivationKind& kind, const at::Tensor& gate, const at::Tensor& up);

}  // namespace maxmoe::ops
