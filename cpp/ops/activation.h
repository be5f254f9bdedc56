// The activation as arguments of an operator, and through ATen. All functions but the last one are differentiable, any
// number of times.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "kernels/experts/activation_kind.h"

namespace maxmoe::ops {

// What the experts compute between their products: one list of arguments, for every operator that computes it.
struct ActivationArguments {
  std::string_view name = {};  // owned by the caller or, in backward, by the autograd context; so is limit_target
  std::optional<double> limit = {};
  std::string_view limit_target = {};
  std::optional<double> gate_softcap = {};
  std::optional<double> up_softcap = {};

  // The arguments of a schema.
  static constexpr const char* kSchema =
      "str activation=\"silu\", float? limit=None, str limit_target=\"input\", float? gate_softcap=None, "
      "float? up_softcap=None";
  // All fields, in the order of the schema.
  template <class Self>
  static auto fields(Self& a) {
    return std::tie(a.name, a.limit, a.limit_target, a.gate_softcap, a.up_softcap);
  }

  void check(const char* op, GateLayout gate) const;
  // Numbers larger than every number of the accumulator's type are infinite, or the largest one.
  ActivationKind kind(const char* op, GateLayout gate, at::ScalarType dtype) const;
};

// Views of the gate and up columns of preactivations [R, 2F]. Without a gate the first one is undefined.
std::pair<at::Tensor, at::Tensor> gate_and_up(GateLayout layout, const at::Tensor& preactivations);

// f(gate) * up, or f(up) if gate is undefined.
at::Tensor activated_rows(const ActivationKind& kind, const at::Tensor& gate, const at::Tensor& up);

// Gate and up become their gradients, from `grad`, the gradient of activated_rows. Returns the activated rows if they
// are wanted.
at::Tensor activation_gradient(const ActivationKind& kind, const at::Tensor& grad, at::Tensor gate, at::Tensor up,
                               bool wants_activated);

}  // namespace maxmoe::ops
