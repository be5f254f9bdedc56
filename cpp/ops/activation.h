// The experts' activations through ATen, for devices without kernels.
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

// activated = f(gate) * up, and its slopes in gate and up, in the accumulator's type. gate is undefined when the
// experts are not gated.
struct ActivatedTensors {
  at::Tensor activated;
  at::Tensor gate_slope;
  at::Tensor up_slope;
};
ActivatedTensors activate(const ActivationKind& kind, const at::Tensor& gate, const at::Tensor& up);

}  // namespace maxmoe::ops
