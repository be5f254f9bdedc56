// The activation as arguments of an operator, and the activations of the experts on all devices but the CPU: through
// ATen, differentiable any number of times, and through CUDA kernels or ATen.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <string_view>
#include <tuple>
#include <utility>

#include "kernels/experts/activation.h"

namespace maxmoe::ops {

// The activation between the products of the experts: one list of arguments for every operator that computes it.
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

// f(gate) * up, or f(up) if gate is undefined. Differentiable.
at::Tensor activated_rows(const ActivationKind& kind, const at::Tensor& gate, const at::Tensor& up);

// As activated_rows, not differentiable, by the CUDA kernel where there is one.
at::Tensor activate(const ActivationKind& kind, const at::Tensor& gate, const at::Tensor& up);

struct ActivationResults {
  at::Tensor activated;  // [R, F]
  at::Tensor products;   // [R]: for each row, the product of `grad` and the activated row
};

// Gate and up become their gradients, from `grad`, the gradient of activated_rows. Returns the activated rows and the
// products if they are wanted. With `weights` [R], which only the CUDA kernel takes, the gradients and the activated
// rows, but not the products, are multiplied by the weight of their row. The activated rows may overwrite `grad`.
ActivationResults activation_gradient(const ActivationKind& kind, const at::Tensor& grad, at::Tensor gate,
                                      at::Tensor up, const std::optional<at::Tensor>& weights, bool wants_activated,
                                      bool wants_products);

// For each row, the product of two rows.
at::Tensor row_products(const at::Tensor& a, const at::Tensor& b);

}  // namespace maxmoe::ops
