#include "ops/activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/gelu.h>
#include <ATen/ops/gelu_backward.h>
#include <ATen/ops/relu.h>
#include <ATen/ops/sigmoid.h>
#include <ATen/ops/silu.h>
#include <ATen/ops/silu_backward.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/threshold_backward.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>
#include <limits>

#include "ops/checks.h"

namespace maxmoe::ops {
namespace {

constexpr double kSwigluoaiSteepness = 1.702;

struct ValueAndSlope {
  Tensor value;
  Tensor slope;
};

ValueAndSlope swish(const Tensor& x, double steepness) {
  const Tensor sigmoid = (x * steepness).sigmoid();
  return {x * sigmoid, sigmoid * (1 + steepness * x * (1 - sigmoid))};
}

ValueAndSlope erf_gelu(const Tensor& x) {
  const Tensor cdf = 0.5 * (1 + (x * M_SQRT1_2).erf());
  const Tensor density = 0.5 * M_2_SQRTPI * M_SQRT1_2 * (-0.5 * x.square()).exp();
  return {x * cdf, cdf + x * density};
}

ValueAndSlope tanh_gelu(const Tensor& x) {
  constexpr double scale = M_2_SQRTPI * M_SQRT1_2;
  constexpr double cubic = 0.044715;
  const Tensor tanh = (scale * (x + cubic * x * x * x)).tanh();
  const Tensor inner_slope = scale * (1 + 3 * cubic * x.square());
  return {0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh.square()) * inner_slope};
}

ValueAndSlope apply(Activation activation, const Tensor& x) {
  switch (activation) {
    case Activation::silu:
      return swish(x, 1.0);
    case Activation::swigluoai:
      return swish(x, kSwigluoaiSteepness);
    case Activation::gelu:
      return erf_gelu(x);
    case Activation::gelu_tanh:
      return tanh_gelu(x);
    case Activation::relu:
      return {x.clamp_min(0), x.gt(0).to(x.scalar_type())};
    case Activation::relu2:
      return {x.clamp_min(0).square(), 2 * x.clamp_min(0)};
  }
  return {};
}

// Infinite where the dtype has no number that large.
double limit_of(const ActivationKind& kind, const Tensor& x) {
  double largest = std::numeric_limits<double>::max();
  if (x.scalar_type() == at::kHalf) largest = std::numeric_limits<c10::Half>::max();
  if (x.scalar_type() == at::kBFloat16) largest = std::numeric_limits<c10::BFloat16>::max();
  return kind.limit > largest ? std::numeric_limits<double>::infinity() : kind.limit;
}

// f(x), new memory.
Tensor value_of(Activation activation, const Tensor& x) {
  switch (activation) {
    case Activation::silu:
      return at::silu(x);
    case Activation::swigluoai:
      return at::sigmoid(x * kSwigluoaiSteepness).mul_(x);
    case Activation::gelu:
      return at::gelu(x, "none");
    case Activation::gelu_tanh:
      return at::gelu(x, "tanh");
    case Activation::relu:
      return at::relu(x);
    case Activation::relu2:
      return at::relu(x).square_();
  }
  return {};
}

// grad * f'(x), in the memory of x.
void overwrite_with_slope(Activation activation, const Tensor& grad, const Tensor& x) {
  Tensor out = x;
  switch (activation) {
    case Activation::silu:
      at::silu_backward_out(out, grad, x);
      return;
    case Activation::swigluoai:  // x * sigmoid(c x) is silu(c x) / c
      at::silu_backward_out(out, grad, out.mul_(kSwigluoaiSteepness));
      return;
    case Activation::gelu:
      at::gelu_backward_out(out, grad, x, "none");
      return;
    case Activation::gelu_tanh:
      at::gelu_backward_out(out, grad, x, "tanh");
      return;
    case Activation::relu:
      at::threshold_backward_out(out, grad, x, 0);
      return;
    case Activation::relu2:
      out.clamp_min_(0).mul_(grad).mul_(2);
      return;
  }
}

}  // namespace

Activation parse_activation(const char* op, std::string_view name) {
  if (name == "silu") return Activation::silu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  if (name == "relu") return Activation::relu;
  if (name == "relu2") return Activation::relu2;
  if (name == "swigluoai") return Activation::swigluoai;
  MAXMOE_CHECK(false, op, "activation must be silu, gelu, gelu_tanh, relu, relu2 or swigluoai, got ", name);
}

std::pair<Tensor, Tensor> gate_and_up(GateLayout layout, const Tensor& preactivations) {
  if (layout == GateLayout::none) return {Tensor(), preactivations};
  if (layout == GateLayout::interleaved) {
    return {preactivations.slice(1, 0, std::nullopt, 2), preactivations.slice(1, 1, std::nullopt, 2)};
  }
  const int64_t width = preactivations.size(1) / 2;
  return {preactivations.narrow(1, 0, width), preactivations.narrow(1, width, width)};
}

Tensor preactivations_of(GateLayout layout, const Tensor& gate, const Tensor& up) {
  if (layout == GateLayout::none) return up;
  if (layout == GateLayout::interleaved) return at::stack({gate, up}, 2).flatten(1);
  return at::cat({gate, up}, 1);
}

Tensor activated_rows(const ActivationKind& kind, const Tensor& gate, const Tensor& up) {
  if (kind.gate == GateLayout::none) return value_of(kind.activation, up);
  const double limit = limit_of(kind, up);
  if (std::isinf(limit) && kind.activation != Activation::swigluoai) {
    return value_of(kind.activation, gate).mul_(up);
  }
  const Tensor factor = up.clamp(-limit, limit);
  if (kind.activation == Activation::swigluoai) factor.add_(1);
  return factor.mul_(value_of(kind.activation, gate.clamp_max(limit)));
}

void overwrite_with_gradient(const ActivationKind& kind, const Tensor& grad_activated, const Tensor& gate,
                             const Tensor& up) {
  if (kind.gate == GateLayout::none) return overwrite_with_slope(kind.activation, grad_activated, up);
  const double limit = limit_of(kind, up);
  const bool is_clipped = !std::isinf(limit);
  const Tensor clipped_gate = is_clipped ? gate.clamp_max(limit) : gate;
  Tensor factor = is_clipped ? up.clamp(-limit, limit) : up;
  if (kind.activation == Activation::swigluoai) factor = factor + 1;
  const Tensor grad_value = grad_activated * factor;
  const Tensor grad_up = grad_activated.mul_(value_of(kind.activation, clipped_gate));
  if (is_clipped) {
    grad_up.masked_fill_(up.abs().gt(limit), 0);
    grad_value.masked_fill_(gate.gt(limit), 0);
  }
  up.copy_(grad_up);
  gate.copy_(clipped_gate);
  overwrite_with_slope(kind.activation, grad_value, gate);
}

ActivatedTensors activate(const ActivationKind& kind, const Tensor& gate, const Tensor& up) {
  if (kind.gate == GateLayout::none) {
    const ValueAndSlope f = apply(kind.activation, up);
    return {f.value, Tensor(), f.slope};
  }
  Tensor factor = up.clamp(-kind.limit, kind.limit);
  if (kind.activation == Activation::swigluoai) factor = factor + 1;
  const ValueAndSlope f = apply(kind.activation, gate.clamp_max(kind.limit));
  const Tensor zero = at::zeros({}, up.options());
  return {f.value * factor, at::where(gate.gt(kind.limit), zero, f.slope * factor),
          at::where(up.abs().gt(kind.limit), zero, f.value)};
}

}  // namespace maxmoe::ops
