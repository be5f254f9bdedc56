// The arguments of the operator expert_ffn, and its two implementations: the kernel and ATen.
#pragma once

#include <array>
#include <limits>
#include <string_view>
#include <tuple>
#include <utility>

#include "kernels/experts/activation_kind.h"
#include "ops/activation.h"
#include "ops/operator.h"
#include "ops/weights.h"

namespace maxmoe::ops {

// Low-rank factors beside a stack of matrices [L, in, out]: `a` reduces rows to r columns, `b` expands them.
struct Factors {
  const OptionalTensor& a;  // [L, in, r]
  const OptionalTensor& b;  // [L, r, out]
  int64_t first_column;     // of the reduced rows, where those of gate, up and down are side by side

  bool are_given() const { return a.has_value(); }
  int64_t rank() const { return a.has_value() ? a->size(2) : 0; }
  int64_t end_column() const { return first_column + rank(); }
};

// The arguments of expert_ffn, expert_ffn_forward and expert_ffn_backward, as the caller gave them.
struct ExpertFfnArguments {
  Tensor x;
  OptionalTensor weights;
  Tensor slots;
  Tensor rows;
  Tensor group_sizes;
  int64_t top_k;
  OptionalTensor gate;  // gate, up and down may be codes [L, out, bytes], with scales and a format
  Tensor up;
  Tensor down;
  OptionalTensor gate_bias;
  OptionalTensor up_bias;
  OptionalTensor down_bias;
  OptionalTensor gate_a, gate_b;  // low-rank factors, with their scale
  OptionalTensor up_a, up_b;
  OptionalTensor down_a, down_b;
  std::string_view activation;  // owned by the caller or, after `load`, by the autograd context
  std::optional<double> limit;
  std::optional<std::string_view> fused_gate;
  bool recompute;
  OptionalTensor gate_scales, gate_zeros;
  OptionalTensor up_scales, up_zeros;
  OptionalTensor down_scales, down_zeros;
  std::optional<std::string_view> gate_format;
  std::optional<std::string_view> up_format;
  std::optional<std::string_view> down_format;

  GateLayout gate_layout() const;
  ActivationKind kind() const;
  // The rows of codes are output features. `gate_weights` needs a gate.
  Weights gate_weights() const { return {*gate, gate_scales, gate_zeros, gate_format, x.size(1), true}; }
  Weights up_weights() const { return {up, up_scales, up_zeros, up_format, x.size(1), true}; }
  Weights down_weights() const { return {down, down_scales, down_zeros, down_format, intermediate_size(), true}; }
  int64_t up_width() const { return up.size(up_format.has_value() ? 1 : 2); }
  int64_t intermediate_size() const { return fused_gate.has_value() ? up_width() / 2 : up_width(); }
  int64_t preactivation_width() const { return gate.has_value() ? 2 * up_width() : up_width(); }
  Factors gate_factors() const { return {gate_a, gate_b, 0}; }
  Factors up_factors() const { return {up_a, up_b, gate_factors().end_column()}; }
  Factors down_factors() const { return {down_a, down_b, up_factors().end_column()}; }
  // Number of columns of the reduced rows.
  int64_t reduced_width() const { return down_factors().end_column(); }
  // Rows of the preactivations and of the reduced rows that forward saves for backward.
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
    visit(self.gate_a);
    visit(self.gate_b);
    visit(self.up_a);
    visit(self.up_b);
    visit(self.down_a);
    visit(self.down_b);
    visit(self.gate_scales);
    visit(self.gate_zeros);
    visit(self.up_scales);
    visit(self.up_zeros);
    visit(self.down_scales);
    visit(self.down_zeros);
  }
};

// What the forward pass computes and the backward pass reads.
struct Intermediates {
  Tensor preactivations;  // [R, 2F], [R, F] without a gate
  Tensor reduced;         // [R, r of gate + up + down]: the rows of x and A times the factors `a`
};

// Calls op(before..., all arguments).
template <class Op, class... Before>
auto call(const Op& op, const ExpertFfnArguments& a, const Before&... before) {
  return op(before..., a.x, a.weights, a.slots, a.rows, a.group_sizes, a.top_k, a.gate, a.up, a.down, a.gate_bias,
            a.up_bias, a.down_bias, a.gate_a, a.gate_b, a.up_a, a.up_b, a.down_a, a.down_b, a.activation, a.limit,
            a.fused_gate, a.recompute, a.gate_scales, a.gate_zeros, a.up_scales, a.up_zeros, a.down_scales,
            a.down_zeros, a.gate_format, a.up_format, a.down_format);
}

// The arguments of the schema after the arguments `Before` of a single operator.
template <class Return, class... Before>
using ExpertFfnSignature =
    Return(Before..., const Tensor& x, const OptionalTensor& weights, const Tensor& slots, const Tensor& rows,
           const Tensor& group_sizes, int64_t top_k, const OptionalTensor& gate, const Tensor& up, const Tensor& down,
           const OptionalTensor& gate_bias, const OptionalTensor& up_bias, const OptionalTensor& down_bias,
           const OptionalTensor& gate_a, const OptionalTensor& gate_b, const OptionalTensor& up_a,
           const OptionalTensor& up_b, const OptionalTensor& down_a, const OptionalTensor& down_b,
           std::string_view activation, std::optional<double> limit, std::optional<std::string_view> fused_gate,
           bool recompute, const OptionalTensor& gate_scales, const OptionalTensor& gate_zeros,
           const OptionalTensor& up_scales, const OptionalTensor& up_zeros, const OptionalTensor& down_scales,
           const OptionalTensor& down_zeros, std::optional<std::string_view> gate_format,
           std::optional<std::string_view> up_format, std::optional<std::string_view> down_format);
inline constexpr Operator<"expert_ffn", ExpertFfnSignature<Tensor>> expert_ffn;

// One value for each argument that may have a gradient.
template <class T>
struct PerInput {
  T x, weights, gate, up, down, gate_bias, up_bias, down_bias, gate_a, gate_b, up_a, up_b, down_a, down_b;

  static constexpr size_t kSize = 14;

  // In the order of output_mask and of the results of expert_ffn_backward.
  std::array<T, kSize> in_order() const {
    return {x, weights, gate, up, down, gate_bias, up_bias, down_bias, gate_a, gate_b, up_a, up_b, down_a, down_b};
  }
  static PerInput from(const std::array<T, kSize>& values) {
    return std::apply([](const auto&... value) { return PerInput{value...}; }, values);
  }
};
using Gradients = PerInput<Tensor>;  // an empty tensor for a gradient that is not wanted
using Wanted = PerInput<bool>;       // output_mask

// Whether a wanted gradient needs the gradient of the activations A or of the preactivations Z. Those of down, its bias
// and its factors do not.
constexpr bool needs_grad_activated(const Wanted& w) {
  return w.x || w.weights || w.gate || w.up || w.gate_bias || w.up_bias || w.gate_a || w.gate_b || w.up_a || w.up_b;
}

// The output [T, D], and the intermediates for backward: the preactivations [R, 2F] and the reduced rows, with R = 0 if
// they are not kept.
using Outputs = std::tuple<Tensor, Tensor, Tensor>;

// Check the arguments of the operator `op`; the first one everything but values of tensors.
void check_expert_ffn_shapes(const char* op, const ExpertFfnArguments& a);
void check_expert_ffn(const char* op, const ExpertFfnArguments& a);
void check_expert_ffn_backward(const Tensor& grad_out, const Intermediates& kept, const Wanted& wanted,
                               const ExpertFfnArguments& a);

// Both implementations of backward compute the intermediates if they are not given, and otherwise overwrite the
// preactivations if they need their gradient.
Outputs expert_ffn_kernel(const ExpertFfnArguments& a, bool keeps_intermediates);
Gradients expert_ffn_backward_kernel(const Tensor& grad_out, const std::optional<Intermediates>& kept,
                                     const Wanted& wanted, const ExpertFfnArguments& a);

// Through ATen, for devices without kernels, and on all devices when the result must be differentiable.
enum class Differentiable { no, yes };
Outputs expert_ffn_aten(const ExpertFfnArguments& a, Differentiable differentiable, bool keeps_intermediates);
Gradients expert_ffn_backward_aten(const Tensor& grad_out, const std::optional<Intermediates>& kept,
                                   const Wanted& wanted, const ExpertFfnArguments& a, Differentiable differentiable);

}  // namespace maxmoe::ops
