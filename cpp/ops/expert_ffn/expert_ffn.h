// The arguments of the operator expert_ffn, and its two implementations: the kernel and ATen.
#pragma once

#include <array>
#include <string_view>
#include <tuple>

#include "kernels/experts/activation.h"
#include "ops/activation.h"
#include "ops/operator.h"
#include "ops/projection.h"

namespace maxmoe::ops {

// The arguments of expert_ffn, expert_ffn_forward and expert_ffn_backward, as the caller gave them.
struct ExpertFfnArguments {
  Tensor x;
  OptionalTensor weights;
  Tensor slots;
  Tensor rows;
  Tensor group_sizes;
  int64_t top_k = 0;
  Projection gate;
  Projection up;
  Projection down;
  ActivationArguments activation;
  std::optional<std::string_view> fused_gate = {};  // owned as the strings of `activation` are
  bool recompute = false;

  // All fields, in the order of the schema.
  template <class Self>
  static auto fields(Self& a) {
    return std::tuple_cat(std::tie(a.x, a.weights, a.slots, a.rows, a.group_sizes, a.top_k), Projection::fields(a.gate),
                          Projection::fields(a.up), Projection::fields(a.down),
                          ActivationArguments::fields(a.activation), std::tie(a.fused_gate, a.recompute));
  }
  // The tensors that may have a gradient, in the order of PerInput.
  template <class Self>
  static auto differentiable(Self& a) {
    return std::tuple_cat(std::tie(a.x, a.weights), Projection::differentiable(a.gate),
                          Projection::differentiable(a.up), Projection::differentiable(a.down));
  }

  GateLayout gate_layout() const;
  ActivationKind kind() const;
  int64_t up_width() const { return up.out_size(); }
  int64_t intermediate_size() const { return fused_gate.has_value() ? up_width() / 2 : up_width(); }
  // On devices other than the CPU the preactivations of gate and up are the results of two products, and saved as they
  // are. Kernels of the CPU, and all paths of its tensors, have them in one tensor.
  bool has_gate_apart() const { return gate.is_given() && !x.is_cpu(); }
  int64_t preactivation_width() const { return gate.is_given() && !has_gate_apart() ? 2 * up_width() : up_width(); }
  int64_t gate_width() const { return has_gate_apart() ? up_width() : 0; }
  // Number of columns of the reduced rows; the columns of gate, up and down are side by side.
  int64_t reduced_width() const { return gate.rank() + up.rank() + down.rank(); }
  // Rows of the preactivations and of the reduced rows that forward saves for backward.
  int64_t num_kept_rows() const { return recompute ? 0 : slots.size(0); }
};

// Tensors that the forward pass computes and the backward pass reads.
struct Intermediates {
  Tensor preactivations;  // [R, 2F], or [R, F] without a gate or with the gate apart
  Tensor reduced;         // [R, r of gate + up + down]: the rows of x and A times the factors `a`
  Tensor gate;            // [R, F] with the gate apart, otherwise [R, 0]
};

// Calls op(before..., all arguments).
template <class Op, class... Before>
auto call(const Op& op, const ExpertFfnArguments& a, const Before&... before) {
  return std::apply([&](const auto&... fields) { return op(before..., fields...); }, ExpertFfnArguments::fields(a));
}

inline constexpr Operator<"expert_ffn", Signature<Tensor, ExpertFfnArguments>> expert_ffn;

// One value for each tensor of a projection that may have a gradient.
template <class T>
struct PerTensor {
  T weights, bias, a, b;
};

// One value for each argument that may have a gradient.
template <class T>
struct PerInput {
  T x, weights;
  PerTensor<T> gate, up, down;

  static constexpr size_t kSize = 14;

  // In the order of output_mask and of the results of expert_ffn_backward.
  std::array<T, kSize> in_order() const {
    const auto fields = [](const PerTensor<T>& p) { return std::tie(p.weights, p.bias, p.a, p.b); };
    const auto to_array = [](const auto&... value) { return std::array<T, kSize>{value...}; };
    return std::apply(to_array, std::tuple_cat(std::tie(x, weights), fields(gate), fields(up), fields(down)));
  }
  static PerInput from(const std::array<T, kSize>& values) {
    return std::apply([](const auto&... value) { return PerInput{value...}; }, values);
  }
};
using Gradients = PerInput<Tensor>;  // an empty tensor for a gradient that is not wanted
using Wanted = PerInput<bool>;       // output_mask

// Whether a wanted gradient needs the gradient of the activations A or of the preactivations Z. The gradients of down,
// its bias and its factors do not.
constexpr bool needs_grad_activated(const Wanted& w) {
  const auto any = [](const PerTensor<bool>& p) { return p.weights || p.bias || p.a || p.b; };
  return w.x || w.weights || any(w.gate) || any(w.up);
}

// The output [T, D], and the intermediates for backward in their order, with R = 0 if they are not kept.
using Outputs = std::tuple<Tensor, Tensor, Tensor, Tensor>;

// Check the arguments of the operator `op`; the first one everything but values of tensors.
void check_expert_ffn_shapes(const char* op, const ExpertFfnArguments& a);
void check_expert_ffn(const char* op, const ExpertFfnArguments& a);
void check_expert_ffn_backward(const Tensor& grad_out, const Intermediates& kept, const Wanted& wanted,
                               const ExpertFfnArguments& a);

// Memory for the intermediates of R rows.
Intermediates empty_intermediates(int64_t num_rows, const ExpertFfnArguments& a);

// The output. The intermediates are written unless `kept` is null.
Tensor expert_ffn_kernel(const ExpertFfnArguments& a, const Intermediates* kept);

// Both implementations of backward compute the intermediates if they are not given, and otherwise overwrite the
// preactivations if they need their gradient.
Gradients expert_ffn_backward_kernel(const Tensor& grad_out, const std::optional<Intermediates>& kept,
                                     const Wanted& wanted, const ExpertFfnArguments& a);

// The same through ATen, for devices without kernels.
Outputs expert_ffn_aten(const ExpertFfnArguments& a, bool keeps_intermediates);
Gradients expert_ffn_backward_aten(const Tensor& grad_out, const std::optional<Intermediates>& kept,
                                   const Wanted& wanted, const ExpertFfnArguments& a);

}  // namespace maxmoe::ops
