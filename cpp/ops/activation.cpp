#include "ops/activation.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include <cmath>

#include "ops/checks.h"

namespace maxmoe::ops {
namespace {

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
      return swish(x, 1.702);
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
