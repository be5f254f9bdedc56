#include "ops/activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>

#include <algorithm>
#include <cmath>
#include <limits>

#include "ops/autograd.h"
#include "ops/checks.h"
#include "ops/cuda_kernels.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// Operations on tensors. With a 16-bit dtype each of them rounds.
struct TensorMath {
  using Scalar = double;
  using Value = Tensor;

  static Tensor exp(const Tensor& x) { return x.exp(); }
  static Tensor tanh(const Tensor& x) { return x.tanh(); }
  static Tensor erf(const Tensor& x) { return x.erf(); }
  static Tensor sigmoid(const Tensor& x) { return x.sigmoid(); }
  static Tensor square(const Tensor& x) { return x.square(); }
  static Tensor cube(const Tensor& x) { return x.pow(3); }
  static Tensor abs(const Tensor& x) { return x.abs(); }
  static Tensor positive(const Tensor& x) { return at::relu(x); }
  static Tensor at_most(const Tensor& x, double limit) { return std::isinf(limit) ? x : x.clamp_max(limit); }
  static Tensor between(const Tensor& x, double limit) { return std::isinf(limit) ? x : x.clamp(-limit, limit); }
  static Tensor zero_where(const Tensor& condition, const Tensor& x) { return x.masked_fill(condition, 0); }
  static Tensor one_where(const Tensor& condition) { return condition; }

  // The functions that ATen computes in one pass, and rounds once. A derivative is the gradient for a gradient of 1.
  template <bool kWithSlope>
  static std::optional<ValueAndSlope<TensorMath>> in_one_pass(const ActivationKind& kind, const Tensor& x) {
    const auto with_slope = [&](const Tensor& value, const auto& backward) {
      return ValueAndSlope<TensorMath>{value, kWithSlope ? backward(at::ones({}, x.options()).expand_as(x)) : Tensor()};
    };
    switch (kind.activation) {
      case Activation::silu:
        return with_slope(at::silu(x), [&](const Tensor& one) { return at::silu_backward(one, x); });
      case Activation::swigluoai:
        // Its derivative at x equals the derivative of silu at kSteepness * x.
        return with_slope((x * kSteepness).sigmoid() * x,
                          [&](const Tensor& one) { return at::silu_backward(one, x * kSteepness); });
      case Activation::gelu:
        return with_slope(at::gelu(x), [&](const Tensor& one) { return at::gelu_backward(one, x); });
      case Activation::gelu_tanh:
        return with_slope(at::gelu(x, "tanh"), [&](const Tensor& one) { return at::gelu_backward(one, x, "tanh"); });
      default:
        return std::nullopt;
    }
  }
};

// The kind with an infinite limit if it is larger than every number of the dtype: then nothing is clipped.
ActivationKind in_range(ActivationKind kind, at::ScalarType dtype) {
  double largest = std::numeric_limits<double>::max();
  if (dtype == at::kHalf) largest = std::numeric_limits<c10::Half>::max();
  if (dtype == at::kBFloat16) largest = std::numeric_limits<c10::BFloat16>::max();
  if (kind.limit > largest) kind.limit = std::numeric_limits<double>::infinity();
  return kind;
}

Tensor activation_gradient_aten(const ActivationKind& kind, const Tensor& grad, Tensor gate, Tensor up) {
  const auto f = activate_pair<TensorMath, true>(in_range(kind, up.scalar_type()), gate, up);
  if (gate.defined()) at::mul_out(gate, f.gate_slope, grad);
  at::mul_out(up, f.up_slope, grad);
  return f.activated;
}

LimitTarget parse_limit_target(const char* op, std::string_view name) {
  return parse<LimitTarget>(op, "limit_target", name, {{"input", LimitTarget::input}, {"output", LimitTarget::output}});
}

}  // namespace

void ActivationArguments::check(const char* op, GateLayout gate) const {
  const Activation activation = parse<Activation>(op, "activation", name, kActivations);
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
  return {parse<Activation>(op, "activation", name, kActivations),
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
  return activate_pair<TensorMath, false>(in_range(kind, up.scalar_type()), gate, up).activated;
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
    const Tensor rows = activation_gradient_aten(kind, grad, gate, up);
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
