// What the parts of the operator expert_ffn share: its arguments, and its two implementations.
#pragma once

#include <array>
#include <limits>
#include <string>
#include <tuple>

#include "kernels/expert_ffn.h"
#include "ops/activation.h"
#include "ops/checks.h"

namespace maxmoe::ops {

// The gradients, in the order of the schema. One that is not wanted is an empty tensor.
enum Wanted : uint8_t { kX, kWeights, kGate, kUp, kDown, kGateBias, kUpBias, kDownBias };
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using OutputMask = std::array<bool, 8>;

// What the three operators share. Tensors are as the caller gave them.
struct ExpertFfnArguments {
  Tensor x;
  OptionalTensor weights;
  Tensor slots;
  Tensor rows;
  Tensor group_sizes;
  int64_t top_k;
  OptionalTensor gate;
  Tensor up;
  Tensor down;
  OptionalTensor gate_bias;
  OptionalTensor up_bias;
  OptionalTensor down_bias;
  std::string activation;
  std::optional<double> limit;
  std::optional<std::string> fused_gate;

  GateLayout gate_layout() const {
    if (fused_gate.has_value())
      return *fused_gate == "interleaved" ? GateLayout::interleaved : GateLayout::concatenated;
    return gate.has_value() ? GateLayout::separate : GateLayout::none;
  }
  ActivationKind kind() const {
    return {parse_activation("expert_ffn", activation), gate_layout(),
            limit.value_or(std::numeric_limits<double>::infinity())};
  }
  int64_t intermediate_size() const { return fused_gate.has_value() ? up.size(2) / 2 : up.size(2); }
  int64_t preactivation_width() const { return gate.has_value() ? 2 * up.size(2) : up.size(2); }
};

// The output, and the preactivations that backward needs: [R, 2F], or empty where they are not kept.
using Outputs = std::tuple<Tensor, Tensor>;

Outputs expert_ffn_kernel(const ExpertFfnArguments& a, bool keeps_preactivations);
Gradients expert_ffn_backward_kernel(const Tensor& grad_out, const Tensor& preactivations, const OutputMask& wanted,
                                     const ExpertFfnArguments& a);

Outputs expert_ffn_aten(const ExpertFfnArguments& a);
Gradients expert_ffn_backward_aten(const Tensor& grad_out, const Tensor& preactivations, const OutputMask& wanted,
                                   const ExpertFfnArguments& a);

}  // namespace maxmoe::ops
