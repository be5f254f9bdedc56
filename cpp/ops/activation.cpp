#include "ops/activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/threshold_backward.h>

#include <cmath>
#include <limits>

#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/cuda_kernels.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

struct Formulas {
  Tensor (*value)(const Tensor& x);                                          // f(x), in new memory
  void (*store_gradient)(Tensor& out, const Tensor& grad, const Tensor& x);  // grad * f'(x); `out` may be x
};

// a * b, in the memory of `a` unless autograd records the product.
Tensor times(const Tensor& a, const Tensor& b) {
  const auto is_recorded = [](const Tensor& tensor) { return requires_grad(tensor) || has_tangent(tensor); };
  return is_recorded(a) || is_recorded(b) ? a * b : a.mul_(b);
}

Formulas formulas_of(Activation activation) {
  static constexpr double kSteepness = 1.702;  // of swigluoai: x * sigmoid(1.702 * x)
  switch (activation) {
    case Activation::silu:
      return {[](const Tensor& x) { return at::silu(x); },
              [](Tensor& out, const Tensor& grad, const Tensor& x) { at::silu_backward_out(out, grad, x); }};
    case Activation::swigluoai:
      // Its derivative at x equals the derivative of silu at 1.702 * x.
      return {
          [](const Tensor& x) { return times((x * kSteepness).sigmoid(), x); },
          [](Tensor& out, const Tensor& grad, const Tensor& x) { at::silu_backward_out(out, grad, x * kSteepness); }};
    case Activation::gelu:
      return {[](const Tensor& x) { return at::gelu(x, "none"); },
              [](Tensor& out, const Tensor& grad, const Tensor& x) { at::gelu_backward_out(out, grad, x, "none"); }};
    case Activation::gelu_tanh:
      return {[](const Tensor& x) { return at::gelu(x, "tanh"); },
              [](Tensor& out, const Tensor& grad, const Tensor& x) { at::gelu_backward_out(out, grad, x, "tanh"); }};
    case Activation::relu:
      return {[](const Tensor& x) { return at::relu(x); },
              [](Tensor& out, const Tensor& grad, const Tensor& x) { at::threshold_backward_out(out, grad, x, 0); }};
    case Activation::relu2:
      return {[](const Tensor& x) { return at::relu(x).square(); },
              [](Tensor& out, const Tensor& grad, const Tensor& x) { at::mul_out(out, at::relu(x).mul_(2), grad); }};
  }
  return {};
}

// Infinite if the limit is larger than every number of the dtype: then nothing is clipped.
double limit_of(const ActivationKind& kind, const Tensor& x) {
  double largest = std::numeric_limits<double>::max();
  if (x.scalar_type() == at::kHalf) largest = std::numeric_limits<c10::Half>::max();
  if (x.scalar_type() == at::kBFloat16) largest = std::numeric_limits<c10::BFloat16>::max();
  return kind.limit > largest ? std::numeric_limits<double>::infinity() : kind.limit;
}

Tensor clipped_gate(const Tensor& gate, double limit) {
  return std::isinf(limit) ? gate : gate.clamp_max(limit);
}

// f(gate) is multiplied by this.
Tensor factor_of(const ActivationKind& kind, const Tensor& up, double limit) {
  const Tensor clipped = std::isinf(limit) ? up : up.clamp(-limit, limit);
  return kind.activation == Activation::swigluoai ? clipped + 1 : clipped;
}

// Every step frees or overwrites what no later step reads: beside gate, up and grad there are two tensors at a time.
Tensor activation_gradient_aten(const ActivationKind& kind, const Tensor& grad, Tensor gate, Tensor up,
                                bool wants_activated) {
  const Formulas f = formulas_of(kind.activation);
  Tensor activated;
  if (kind.gate == GateLayout::none) {
    if (wants_activated) activated = f.value(up);
    f.store_gradient(up, grad, up);
    return activated;
  }
  const double limit = limit_of(kind, up);
  const Tensor value = f.value(clipped_gate(gate, limit));
  const Tensor factor = factor_of(kind, up, limit);
  {
    const Tensor is_clipped = std::isinf(limit) ? Tensor() : gate.gt(limit);
    f.store_gradient(gate, grad * factor, clipped_gate(gate, limit));
    if (is_clipped.defined()) gate.masked_fill_(is_clipped, 0);
  }
  if (wants_activated) activated = value * factor;
  const Tensor is_clipped = std::isinf(limit) ? Tensor() : up.abs().gt(limit);
  at::mul_out(up, grad, value);
  if (is_clipped.defined()) up.masked_fill_(is_clipped, 0);
  return activated;
}

}  // namespace

Activation parse_activation(const char* op, std::string_view name) {
  return parse<Activation>(op, "activation", name,
                           {{"silu", Activation::silu},
                            {"gelu", Activation::gelu},
                            {"gelu_tanh", Activation::gelu_tanh},
                            {"relu", Activation::relu},
                            {"relu2", Activation::relu2},
                            {"swigluoai", Activation::swigluoai}});
}

std::pair<Tensor, Tensor> gate_and_up(GateLayout layout, const Tensor& preactivations) {
  if (layout == GateLayout::none) return {Tensor(), preactivations};
  const int64_t width = preactivations.size(1) / 2;
  const PreactivationColumns columns = preactivation_columns(layout, width, 0);
  const auto part = [&](int64_t first) {
    return preactivations.slice(1, first, first + width * columns.stride, columns.stride);
  };
  return {part(columns.gate), part(columns.up)};
}

Tensor activated_rows(const ActivationKind& kind, const Tensor& gate, const Tensor& up) {
  const Formulas f = formulas_of(kind.activation);
  if (kind.gate == GateLayout::none) return f.value(up);
  const double limit = limit_of(kind, up);
  return times(f.value(clipped_gate(gate, limit)), factor_of(kind, up, limit));
}

Tensor activate(const ActivationKind& kind, const Tensor& gate, const Tensor& up) {
  const auto kernels = cuda_kernels(up);
  if (!kernels.has_value()) return activated_rows(kind, gate, up);
  const Tensor out = at::empty(up.sizes(), up.options());
  for_dtype(up.scalar_type(), [&]<class T>() {
    kernels->rows<T>().activate_rows(
        {kind, gate.defined() ? const_view<T>(gate) : ConstMatrixView<T>{}, const_view<T>(up), view<T>(out)},
        kernels->stream);
  });
  return out;
}

ActivationResults activation_gradient(const ActivationKind& kind, const Tensor& grad, Tensor gate, Tensor up,
                                      bool wants_activated, bool wants_products) {
  const auto kernels = cuda_kernels(up);
  if (!kernels.has_value()) {
    const Tensor rows = activation_gradient_aten(kind, grad, gate, up, wants_activated || wants_products);
    return {rows, wants_products ? row_products(rows, grad) : Tensor()};
  }
  ActivationResults results;
  if (wants_activated) results.activated = at::empty(up.sizes(), up.options());
  if (wants_products) {
    results.products = at::empty({up.size(0)}, up.options().dtype(accumulator_type(up.scalar_type())));
  }
  for_dtype(up.scalar_type(), [&]<class T>() {
    kernels->rows<T>().activate_rows_backward(
        {kind, Rows(grad), /*weights=*/nullptr, gate.defined() ? view<T>(gate) : MatrixView<T>{}, view<T>(up),
         wants_activated ? view<T>(results.activated) : MatrixView<T>{},
         wants_products ? pointer<Accumulator<T>>(results.products) : nullptr},
        kernels->stream);
  });
  return results;
}

Tensor row_products(const Tensor& a, const Tensor& b) {
  return (a * b).sum(1, /*keepdim=*/false, accumulator_type(a.scalar_type()));
}

}  // namespace maxmoe::ops
