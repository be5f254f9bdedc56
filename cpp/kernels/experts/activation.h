// The activations of the experts: names, formulas and derivatives, written once. Formulas are for single numbers, in
// CUDA kernels, for blocks of a row, in CPU kernels (activation.simd.h), and for tensors, on other devices
// (ops/activation.cpp).
//
// The template argument Math selects one: Math::Scalar is the type of numbers, Math::Value a number, a block or a
// tensor, and its static functions are the operations of the formulas. Comparisons propagate NaN: x <= 0 is false for a
// NaN, which selects x. Since everything is a template of Math, each instruction set has its own functions.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include "kernels/isa/isa.h"

namespace maxmoe {

enum class Activation { silu, gelu, gelu_tanh, relu, relu2, swigluoai, situ };

// Their names as arguments of operators.
constexpr std::pair<const char*, Activation> kActivations[] = {
    {"silu", Activation::silu}, {"gelu", Activation::gelu},   {"gelu_tanh", Activation::gelu_tanh},
    {"relu", Activation::relu}, {"relu2", Activation::relu2}, {"swigluoai", Activation::swigluoai},
    {"situ", Activation::situ},
};

// Whether the activation requires a gate, because it also applies a function to up.
MAXMOE_INLINE bool needs_gate(Activation activation) {
  return activation == Activation::swigluoai || activation == Activation::situ;
}

// Where the gate projection is stored: there is none; in separate matrices; or in the matrices of up, before their
// columns (concatenated) or alternating with them (interleaved).
enum class GateLayout { none, separate, concatenated, interleaved };

// Whether a limit clips the gate before the activation, or the activated gate.
enum class LimitTarget { input, output };

struct ActivationKind {
  Activation activation;
  GateLayout gate;
  double limit;  // the limited number is clipped to (-inf, limit], up to [-limit, limit]; infinity: no clipping
  LimitTarget limit_target = LimitTarget::input;
  double gate_softcap = 0.0;  // situ: f(gate) = gate_softcap * tanh(gate / gate_softcap) * sigmoid(gate)
  double up_softcap = 0.0;
};

// In a row of preactivations: the index of the gate and of up of column `begin` out of `width`, and the distance to the
// next column. Preactivations of a separate gate are concatenated.
struct PreactivationColumns {
  int64_t gate;
  int64_t up;
  int64_t stride;
};

MAXMOE_INLINE PreactivationColumns preactivation_columns(GateLayout layout, int64_t width, int64_t begin) {
  if (layout == GateLayout::interleaved) return {2 * begin, 2 * begin + 1, 2};
  return {begin, layout == GateLayout::none ? begin : width + begin, 1};
}

// Operations on single numbers.
template <class S>
struct NumberMath {
  using Scalar = S;
  using Value = S;

  MAXMOE_DEVICE MAXMOE_INLINE static S exp(S x) { return std::exp(x); }
  MAXMOE_DEVICE MAXMOE_INLINE static S tanh(S x) { return std::tanh(x); }
  MAXMOE_DEVICE MAXMOE_INLINE static S erf(S x) { return std::erf(x); }
  MAXMOE_DEVICE MAXMOE_INLINE static S sigmoid(S x) { return S(1) / (S(1) + std::exp(-x)); }
  MAXMOE_DEVICE MAXMOE_INLINE static S square(S x) { return x * x; }
  MAXMOE_DEVICE MAXMOE_INLINE static S cube(S x) { return x * x * x; }
  MAXMOE_DEVICE MAXMOE_INLINE static S abs(S x) { return std::fabs(x); }
  MAXMOE_DEVICE MAXMOE_INLINE static S positive(S x) { return x <= S(0) ? S(0) : x; }
  MAXMOE_DEVICE MAXMOE_INLINE static S at_most(S x, S limit) { return x > limit ? limit : x; }
  MAXMOE_DEVICE MAXMOE_INLINE static S between(S x, S limit) { return x > limit ? limit : x < -limit ? -limit : x; }
  // 0 where the condition holds, elsewhere x; and 1 where it holds, elsewhere 0.
  MAXMOE_DEVICE MAXMOE_INLINE static S zero_where(bool condition, S x) { return condition ? S(0) : x; }
  MAXMOE_DEVICE MAXMOE_INLINE static S one_where(bool condition) { return condition ? S(1) : S(0); }
};

// A function and its derivative: value = f(x), slope = f'(x). Without kWithSlope the slope is empty.
template <class Math>
struct ValueAndSlope {
  Math::Value value;
  Math::Value slope = {};
};

constexpr double kSteepness = 1.702;  // swigluoai: f(x) = x * sigmoid(1.702 * x)

// x * sigmoid(steepness * x)
template <class Math, bool kWithSlope, class Value = Math::Value, class S = Math::Scalar>
MAXMOE_DEVICE ValueAndSlope<Math> swish(const Value& x, S steepness) {
  if constexpr (!kWithSlope) return {x * Math::sigmoid(steepness * x)};
  const Value sigmoid = Math::sigmoid(steepness * x);
  return {x * sigmoid, sigmoid * (S(1) + steepness * x * (S(1) - sigmoid))};
}

// x * Phi(x), with the cumulative distribution function Phi of the normal distribution.
template <class Math, bool kWithSlope, class Value = Math::Value, class S = Math::Scalar>
MAXMOE_DEVICE ValueAndSlope<Math> gelu(const Value& x) {
  const Value cdf = S(0.5) * (S(1) + Math::erf(x * S(M_SQRT1_2)));
  if constexpr (!kWithSlope) return {x * cdf};
  const Value density = S(0.5 * M_2_SQRTPI * M_SQRT1_2) * Math::exp(S(-0.5) * Math::square(x));
  return {x * cdf, cdf + x * density};
}

// The approximation of gelu with tanh.
template <class Math, bool kWithSlope, class Value = Math::Value, class S = Math::Scalar>
MAXMOE_DEVICE ValueAndSlope<Math> gelu_tanh(const Value& x) {
  constexpr S scale = S(M_2_SQRTPI * M_SQRT1_2);
  constexpr S cubic = S(0.044715);
  const Value tanh = Math::tanh(scale * (x + cubic * Math::cube(x)));
  if constexpr (!kWithSlope) return {S(0.5) * x * (S(1) + tanh)};
  return {S(0.5) * x * (S(1) + tanh), S(0.5) * (S(1) + tanh) + S(0.5) * x * (S(1) - Math::square(tanh)) * scale *
                                                                   (S(1) + S(3) * cubic * Math::square(x))};
}

// cap * tanh(x / cap)
template <class Math, bool kWithSlope, class Value = Math::Value, class S = Math::Scalar>
MAXMOE_DEVICE ValueAndSlope<Math> softcap(const Value& x, S cap) {
  const Value tanh = Math::tanh(x / cap);
  if constexpr (!kWithSlope) return {cap * tanh};
  return {cap * tanh, S(1) - Math::square(tanh)};
}

// cap * tanh(x / cap) * sigmoid(x)
template <class Math, bool kWithSlope, class Value = Math::Value, class S = Math::Scalar>
MAXMOE_DEVICE ValueAndSlope<Math> softcapped_swish(const Value& x, S cap) {
  const ValueAndSlope<Math> capped = softcap<Math, kWithSlope>(x, cap);
  const Value sigmoid = Math::sigmoid(x);
  if constexpr (!kWithSlope) return {capped.value * sigmoid};
  return {capped.value * sigmoid, sigmoid * (capped.slope + capped.value * (S(1) - sigmoid))};
}

// The activation f and its derivative at x: the gate, or up without a gate.
template <class Math, bool kWithSlope, class Value = Math::Value, class S = Math::Scalar>
MAXMOE_DEVICE ValueAndSlope<Math> activate(const ActivationKind& kind, const Value& x) {
  if constexpr (requires { Math::template in_one_pass<kWithSlope>(kind, x); }) {
    if (const auto f = Math::template in_one_pass<kWithSlope>(kind, x)) return *f;
  }
  switch (kind.activation) {
    case Activation::silu:
      return swish<Math, kWithSlope>(x, S(1));
    case Activation::swigluoai:
      return swish<Math, kWithSlope>(x, S(kSteepness));
    case Activation::gelu:
      return gelu<Math, kWithSlope>(x);
    case Activation::gelu_tanh:
      return gelu_tanh<Math, kWithSlope>(x);
    case Activation::relu:
      if constexpr (!kWithSlope) return {Math::positive(x)};
      return {Math::positive(x), Math::one_where(x > S(0))};
    case Activation::relu2: {
      const Value positive = Math::positive(x);
      if constexpr (!kWithSlope) return {Math::square(positive)};
      return {Math::square(positive), S(2) * positive};
    }
    case Activation::situ:
      return softcapped_swish<Math, kWithSlope>(x, static_cast<S>(kind.gate_softcap));
  }
  return {};
}

// activated = f(gate) * h(up), and its derivatives with respect to gate and up. Without kWithSlope these are empty.
template <class Math>
struct Activated {
  Math::Value activated;
  Math::Value gate_slope = {};
  Math::Value up_slope = {};
};

// A limit of infinity means no clipping: the passes over a block that would clip it are skipped.
template <class Math, bool kWithSlope, class Value = Math::Value, class S = Math::Scalar>
MAXMOE_DEVICE Activated<Math> activate_gated(const ActivationKind& kind, const Value& gate, const Value& up) {
  if (kind.activation == Activation::situ) {
    const ValueAndSlope<Math> f = activate<Math, kWithSlope>(kind, gate);
    const ValueAndSlope<Math> h = softcap<Math, kWithSlope>(up, static_cast<S>(kind.up_softcap));
    if constexpr (!kWithSlope) return {f.value * h.value};
    return {f.value * h.value, f.slope * h.value, f.value * h.slope};
  }
  const S limit = static_cast<S>(kind.limit);
  if (limit > std::numeric_limits<S>::max() && kind.activation != Activation::swigluoai) {
    const ValueAndSlope<Math> f = activate<Math, kWithSlope>(kind, gate);
    if constexpr (!kWithSlope) return {f.value * up};
    return {f.value * up, f.slope * up, f.value};
  }
  const S one = kind.activation == Activation::swigluoai ? S(1) : S(0);
  const Value factor = one + Math::between(up, limit);
  if (kind.limit_target == LimitTarget::output) {
    const ValueAndSlope<Math> f = activate<Math, kWithSlope>(kind, gate);
    const Value clipped = Math::at_most(f.value, limit);
    if constexpr (!kWithSlope) return {clipped * factor};
    return {clipped * factor, Math::zero_where(f.value > limit, f.slope * factor),
            Math::zero_where(Math::abs(up) > limit, clipped)};
  }
  const Value clipped = Math::at_most(gate, limit);
  const ValueAndSlope<Math> f = activate<Math, kWithSlope>(kind, clipped);
  if constexpr (!kWithSlope) return {f.value * factor};
  return {f.value * factor, Math::zero_where(gate > limit, f.slope * factor),
          Math::zero_where(Math::abs(up) > limit, f.value)};
}

// As activate_gated; without a gate activated = f(up), and `gate` is not read.
template <class Math, bool kWithSlope, class Value = Math::Value>
MAXMOE_DEVICE Activated<Math> activate_pair(const ActivationKind& kind, const Value& gate, const Value& up) {
  if (kind.gate != GateLayout::none) return activate_gated<Math, kWithSlope>(kind, gate, up);
  const ValueAndSlope<Math> f = activate<Math, kWithSlope>(kind, up);
  return {f.value, {}, f.slope};
}

}  // namespace maxmoe
