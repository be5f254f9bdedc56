// The arguments of the operator expert_ffn, and its two implementations: the kernel and ATen.
#pragma once

#include <array>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>

#include "kernels/activation_kind.h"
#include "ops/activation.h"
#include "ops/operator.h"

namespace maxmoe::ops {

// The arguments of expert_ffn, expert_ffn_forward and expert_ffn_backward, as the caller gave them.
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
  std::string_view activation;  // owned by the caller or, after `load`, by the autograd context
  std::optional<double> limit;
  std::optional<std::string_view> fused_gate;
  bool recompute;

  GateLayout gate_layout() const;
  ActivationKind kind() const;
  int64_t intermediate_size() const { return fused_gate.has_value() ? up.size(2) / 2 : up.size(2); }
  int64_t preactivation_width() const { return gate.has_value() ? 2 * up.size(2) : up.size(2); }
  // Rows of the preactivations that forward saves for backward.
  int64_t num_kept_rows() const { return recompute ? 0 : slots.size(0); }

  // Calls visit(tensor) for every tensor, in the order of the schema.
  template <class Self, class Visit>
  static void for_each_tensor(Self& self, const Visit& visit) {
    visit(self.x);
    visit(self.weights);
    visit(self.slots);
    visit(self.rows);
    visit(self.group_sizes);
    visit(self.gate);
    visit(self.up);
    visit(self.down);
    visit(self.gate_bias);
    visit(self.up_bias);
    visit(self.down_bias);
  }

  // Stores the arguments and the preactivations in an autograd context, and reads them back.
  void save(AutogradContext* ctx, const Tensor& preactivations) const;
  static std::pair<ExpertFfnArguments, Tensor> load(AutogradContext* ctx);
};

// Calls op(before..., all arguments).
template <class Op, class... Before>
auto call(const Op& op, const ExpertFfnArguments& a, const Before&... before) {
  return op(before..., a.x, a.weights, a.slots, a.rows, a.group_sizes, a.top_k, a.gate, a.up, a.down, a.gate_bias,
            a.up_bias, a.down_bias, a.activation, a.limit, a.fused_gate, a.recompute);
}

// One value for each argument that may have a gradient.
template <class T>
struct PerInput {
  T x, weights, gate, up, down, gate_bias, up_bias, down_bias;

  // In the order of output_mask and of the results of expert_ffn_backward.
  std::array<T, 8> in_order() const { return {x, weights, gate, up, down, gate_bias, up_bias, down_bias}; }
  static PerInput from(const std::array<T, 8>& values) {
    return std::apply([](const auto&... value) { return PerInput{value...}; }, values);
  }
};
using Gradients = PerInput<Tensor>;  // an empty tensor for a gradient that is not wanted
using Wanted = PerInput<bool>;       // output_mask

// Whether a wanted gradient needs the gradient of the activations A or of the preactivations Z. Those of down and its
// bias do not.
constexpr bool needs_grad_activated(const Wanted& w) {
  return w.x || w.weights || w.gate || w.up || w.gate_bias || w.up_bias;
}

// The output [T, D], and the preactivations [R, 2F] for backward, or [0, 2F] if they are not kept.
using Outputs = std::tuple<Tensor, Tensor>;

// Both implementations of backward compute the preactivations if they are not given, and otherwise overwrite them if
// they need their gradient.
Outputs expert_ffn_kernel(const ExpertFfnArguments& a, bool keeps_preactivations);
Gradients expert_ffn_backward_kernel(const Tensor& grad_out, const OptionalTensor& preactivations, const Wanted& wanted,
                                     const ExpertFfnArguments& a);

// Through ATen, for devices without kernels, and on all devices when the result must be differentiable.
enum class Differentiable { no, yes };
Outputs expert_ffn_aten(const ExpertFfnArguments& a, Differentiable differentiable);

Gradients expert_ffn_backward_aten(const Tensor& grad_out, const OptionalTensor& preactivations, const Wanted& wanted,
                                   const ExpertFfnArguments& a, Differentiable differentiable);

}  // namespace maxmoe::ops
