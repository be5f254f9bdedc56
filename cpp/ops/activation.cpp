#include "ops/activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/tanh_backward.h>
#include <ATen/ops/threshold_backward.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/cuda_kernels.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// a * b, in the memory of `a` unless autograd records the product.
Tensor times(const Tensor& a, const Tensor& b) {
  const auto is_recorded = [](const Tensor& tensor) { return requires_grad(tensor) || has_tangent(tensor); };
  return is_recorded(a) || is_recorded(b) ? a * b : a.mul_(b);
}

// cap * tanh(x / cap)
Tensor softcapped(const Tensor& x, double cap) {
  return (x / cap).tanh() * cap;
}

constexpr double kSteepness = 1.702;  // swigluoai: f(x) = x * sigmoid(1.702 * x)

// f(x), in new memory.
Tensor value_of(const ActivationKind& kind, const Tensor& x) {
  switch (kind.activation) {
    case Activation::silu:
      return at::silu(x);
    case Activation::swigluoai:
      return times((x * kSteepness).sigmoid(), x);
    case Activation::gelu:
      return at::gelu(x, "none");
    case Activation::gelu_tanh:
      return at::gelu(x, "tanh");
    case Activation::relu:
      return at::relu(x);
    case Activation::relu2:
      return at::relu(x).square();
    case Activation::situ:
      return times(x.sigmoid(), softcapped(x, kind.gate_softcap));
  }
  return {};
}

// out = grad * f'(x). `out` may be x.
Tensor& store_gradient(const ActivationKind& kind, Tensor& out, const Tensor& grad, const Tensor& x) {
  switch (kind.activation) {
    case Activation::silu:
      return at::silu_backward_out(out, grad, x);
    case Activation::swigluoai:
      // Its derivative at x equals the derivative of silu at 1.702 * x.
      return at::silu_backward_out(out, grad, x * kSteepness);
    case Activation::gelu:
      return at::gelu_backward_out(out, grad, x, "none");
    case Activation::gelu_tanh:
      return at::gelu_backward_out(out, grad, x, "tanh");
    case Activation::relu:
      return at::threshold_backward_out(out, grad, x, 0);
    case Activation::relu2:
      return at::mul_out(out, at::relu(x).mul_(2), grad);
    case Activation::situ: {
      const Tensor sigmoid = x.sigmoid();
      const Tensor tanh = (x / kind.gate_softcap).tanh_();
      const Tensor of_cap = at::tanh_backward(sigmoid, tanh);
      const Tensor slope = tanh.mul_(kind.gate_softcap).mul_(sigmoid).mul_(1 - sigmoid).add_(of_cap);
      return at::mul_out(out, grad, slope);
    }
  }
  return out;
}

// Infinite if the limit is larger than every number of the dtype: then nothing is clipped.
double limit_of(const ActivationKind& kind, const Tensor& x) {
  double largest = std::numeric_limits<double>::max();
  if (x.scalar_type() == at::kHalf) largest = std::numeric_limits<c10::Half>::max();
  if (x.scalar_type() == at::kBFloat16) largest = std::numeric_limits<c10::BFloat16>::max();
  return kind.limit > largest ? std::numeric_limits<double>::infinity() : kind.limit;
}

// x clipped from above if the limit of the kind is for `target`.
Tensor clipped(const ActivationKind& kind, LimitTarget target, const Tensor& x, double limit) {
  return std::isinf(limit) || kind.limit_target != target ? x : x.clamp_max(limit);
}

// f(gate) with its limit, and the tensor that the limit clips, before the clipping: the gate or f(gate).
struct GateValue {
  Tensor value;
  Tensor limited;
};

GateValue gate_value(const ActivationKind& kind, const Tensor& gate, double limit) {
  const Tensor value = value_of(kind, clipped(kind, LimitTarget::input, gate, limit));
  const Tensor limited = kind.limit_target == LimitTarget::input ? gate : value;
  return {clipped(kind, LimitTarget::output, value, limit), limited};
}

// The factor of f(gate), a function of up.
Tensor factor_of(const ActivationKind& kind, const Tensor& up, double limit) {
  if (kind.activation == Activation::situ) return softcapped(up, kind.up_softcap);
  const Tensor clipped = std::isinf(limit) ? up : up.clamp(-limit, limit);
  return kind.activation == Activation::swigluoai ? clipped + 1 : clipped;
}

// up = grad * the derivative of factor_of
void store_factor_gradient(const ActivationKind& kind, Tensor& up, const Tensor& grad, const Tensor& value,
                           double limit) {
  if (kind.activation == Activation::situ) {
    const Tensor tanh = (up / kind.up_softcap).tanh_();
    at::mul_out(up, grad, value);
    at::tanh_backward_out(up, up, tanh);
    return;
  }
  const Tensor is_clipped = std::isinf(limit) ? Tensor() : up.abs().gt(limit);
  at::mul_out(up, grad, value);
  if (is_clipped.defined()) up.masked_fill_(is_clipped, 0);
}

// Every step frees or overwrites the tensors that no later step reads: beside gate, up and grad there are two at a
// time.
Tensor activation_gradient_aten(const ActivationKind& kind, const Tensor& grad, Tensor gate, Tensor up,
                                bool wants_activated) {
  Tensor activated;
  if (kind.gate == GateLayout::none) {
    if (wants_activated) activated = value_of(kind, up);
    store_gradient(kind, up, grad, up);
    return activated;
  }
  const double limit = limit_of(kind, up);
  const auto [value, limited] = gate_value(kind, gate, limit);
  const Tensor factor = factor_of(kind, up, limit);
  {
    const Tensor is_clipped = std::isinf(limit) ? Tensor() : limited.gt(limit);
    store_gradient(kind, gate, grad * factor, clipped(kind, LimitTarget::input, gate, limit));
    if (is_clipped.defined()) gate.masked_fill_(is_clipped, 0);
  }
  if (wants_activated) activated = value * factor;
  store_factor_gradient(kind, up, grad, value, limit);
  return activated;
}

Activation parse_activation(const char* op, std::string_view name) {
  return parse<Activation>(op, "activation", name,
                           {{"silu", Activation::silu},
                            {"gelu", Activation::gelu},
                            {"gelu_tanh", Activation::gelu_tanh},
                            {"relu", Activation::relu},
                            {"relu2", Activation::relu2},
                            {"swigluoai", Activation::swigluoai},
                            {"situ", Activation::situ}});
}

LimitTarget parse_limit_target(const char* op, std::string_view name) {
  return parse<LimitTarget>(op, "limit_target", name, {{"input", LimitTarget::input}, {"output", LimitTarget::output}});
}

}  // namespace

void ActivationArguments::check(const char* op, GateLayout gate) const {
  const Activation activation = parse_activation(op, name);
  const LimitTarget target = parse_limit_target(op, limit_target);
  const bool gated = gate != GateLayout::none;
  const bool has_softcaps = activation == Activation::situ;
  MAXMOE_CHECK(gated || !needs_gate(activation), op, "gate must be given for activation ", name, ", got None");
  MAXMOE_CHECK(gated || !limit.has_value(), op, "limit must be None without gate, got ", limit.value_or(0));
  MAXMOE_CHECK(limit.value_or(1.0) > 0, op, "limit must be positive, got ", limit.value_or(1.0));
  MAXMOE_CHECK(!has_softcaps || !limit.has_value(), op, "limit must be None for activation ", name, ", got ",
               limit.value_or(0));
  MAXMOE_CHECK(target == LimitTarget::input || limit.has_value(), op,
               "limit must be given for limit_target output, got None");
  for (const auto& [field, softcap] : {std::pair("gate_softcap", gate_softcap), std::pair("up_softcap", up_softcap)}) {
    MAXMOE_CHECK(has_softcaps || !softcap.has_value(), op, field, " must be None for activation ", name, ", got ",
                 softcap.value_or(0));
    MAXMOE_CHECK(!has_softcaps || softcap.has_value(), op, field, " must be given for activation ", name, ", got None");
    MAXMOE_CHECK(softcap.value_or(1.0) > 0 && std::isfinite(softcap.value_or(1.0)), op, field,
                 " must be positive and finite, got ", softcap.value_or(1.0));
  }
}

ActivationKind ActivationArguments::kind(const char* op, GateLayout gate, at::ScalarType dtype) const {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const bool is_double = dtype == at::kDouble;
  const double largest = is_double ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  const double bound = limit.value_or(infinity);
  return {parse_activation(op, name),
          gate,
          bound > largest ? infinity : bound,
          parse_limit_target(op, limit_target),
          std::min(gate_softcap.value_or(0.0), largest),
          std::min(up_softcap.value_or(0.0), largest)};
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
  if (kind.gate == GateLayout::none) return value_of(kind, up);
  const double limit = limit_of(kind, up);
  return times(gate_value(kind, gate, limit).value, factor_of(kind, up, limit));
}

Tensor activate(const ActivationKind& kind, const Tensor& gate, const Tensor& up) {
  const auto kernels = cuda_kernels(up, "activate_rows");
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
                                      const OptionalTensor& weights, bool wants_activated, bool wants_products) {
  const auto kernels = cuda_kernels(up, "activate_rows_backward");
  if (!kernels.has_value()) {
    const Tensor rows = activation_gradient_aten(kind, grad, gate, up, wants_activated || wants_products);
    return {rows, wants_products ? row_products(rows, grad) : Tensor()};
  }
  ActivationResults results;
  if (wants_activated) results.activated = grad;
  if (wants_products) {
    results.products = at::empty({up.size(0)}, up.options().dtype(accumulator_type(up.scalar_type())));
  }
  const List factors(accumulator_weights(weights, up.scalar_type()));
  for_dtype(up.scalar_type(), [&]<class T>() {
    kernels->rows<T>().activate_rows_backward(
        {kind, const_view<T>(grad), factors, gate.defined() ? view<T>(gate) : MatrixView<T>{}, view<T>(up),
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
