// The activations of the experts and their derivatives, for one number (cpp/kernels/experts/activation.simd.h).
#pragma once

#include "cuda/device.h"
#include "kernels/experts/activation_kind.h"

namespace maxmoe::cuda {

// value = f(x), slope = f'(x)
template <class S>
struct ValueAndSlope {
  S value;
  S slope;
};

// x * sigmoid(steepness * x)
template <class S>
__device__ ValueAndSlope<S> swish(S x, S steepness) {
  const S sigmoid = S(1) / (S(1) + std::exp(-steepness * x));
  return {x * sigmoid, sigmoid * (S(1) + steepness * x * (S(1) - sigmoid))};
}

// x * Phi(x), with the cumulative distribution function Phi of the normal distribution.
template <class S>
__device__ ValueAndSlope<S> gelu(S x) {
  const S cdf = S(0.5) * (S(1) + std::erf(x * S(M_SQRT1_2)));
  const S density = S(0.5 * M_2_SQRTPI * M_SQRT1_2) * std::exp(S(-0.5) * x * x);
  return {x * cdf, cdf + x * density};
}

// The approximation of gelu with tanh.
template <class S>
__device__ ValueAndSlope<S> gelu_tanh(S x) {
  constexpr S scale = S(M_2_SQRTPI * M_SQRT1_2);
  constexpr S cubic = S(0.044715);
  const S tanh = std::tanh(scale * (x + cubic * x * x * x));
  return {S(0.5) * x * (S(1) + tanh),
          S(0.5) * (S(1) + tanh) + S(0.5) * x * (S(1) - tanh * tanh) * scale * (S(1) + S(3) * cubic * x * x)};
}

// Comparisons propagate NaN: x <= 0 is false for a NaN, which selects x.
template <class S>
__device__ ValueAndSlope<S> activate(Activation activation, S x) {
  const S positive = x <= S(0) ? S(0) : x;
  switch (activation) {
    case Activation::silu:
      return swish(x, S(1));
    case Activation::swigluoai:
      return swish(x, S(1.702));
    case Activation::gelu:
      return gelu(x);
    case Activation::gelu_tanh:
      return gelu_tanh(x);
    case Activation::relu:
      return {positive, x > S(0) ? S(1) : S(0)};
    case Activation::relu2:
      return {positive * positive, S(2) * positive};
  }
  return {S(0), S(0)};
}

// activated = f(gate) * up, and its derivatives with respect to gate and up. Without a gate it is f(up).
template <class S>
struct Activated {
  S activated;
  S gate_slope;
  S up_slope;
};

template <class S>
__device__ Activated<S> activate_pair(const ActivationKind& kind, S gate, S up) {
  if (kind.gate == GateLayout::none) {
    const ValueAndSlope<S> f = activate(kind.activation, up);
    return {f.value, S(0), f.slope};
  }
  const S limit = static_cast<S>(kind.limit);
  const bool is_gate_clipped = gate > limit;
  const bool is_up_clipped = std::fabs(up) > limit;
  const S one = kind.activation == Activation::swigluoai ? S(1) : S(0);
  const S factor = one + (up > limit ? limit : up < -limit ? -limit : up);
  const ValueAndSlope<S> f = activate(kind.activation, is_gate_clipped ? limit : gate);
  return {f.value * factor, is_gate_clipped ? S(0) : f.slope * factor, is_up_clipped ? S(0) : f.value};
}

}  // namespace maxmoe::cuda
