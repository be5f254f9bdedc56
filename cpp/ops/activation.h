// The experts' activations through ATen, for devices without kernels.
#pragma once

#include <ATen/core/Tensor.h>

#include <string_view>

#include "kernels/expert_ffn.h"

namespace maxmoe::ops {

Activation parse_activation(const char* op, std::string_view name);

// activated = f(gate) * up, and its slopes in gate and up, in the accumulator's type. gate is undefined when the
// experts are not gated.
struct ActivatedTensors {
  at::Tensor activated;
  at::Tensor gate_slope;
  at::Tensor up_slope;
};
ActivatedTensors activate(const ActivationKind& kind, const at::Tensor& gate, const at::Tensor& up);

}  // namespace maxmoe::ops
