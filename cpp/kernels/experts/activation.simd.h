// The activations of the experts, on blocks of one row.
#pragma once

#include <Eigen/Core>
#include <cmath>

#include "kernels/experts/activation_kind.h"
#include "kernels/matrix/row.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// A block of a row. Its maximum size is part of the type, so that Eigen stores it on the stack.
template <class S>
using Block = Eigen::Array<S, Eigen::Dynamic, 1, Eigen::ColMajor, kColumnBlock, 1>;

// An activation and its derivative: value = f(x), slope = f'(x). Without kWithSlope the slope is empty.
template <class S>
struct ValueAndSlope {
  Block<S> value;
  Block<S> slope = {};
};

// x * sigmoid(steepness * x)
template <class S, bool kWithSlope>
ValueAndSlope<S> swish(const Block<S>& x, S steepness) {
  if constexpr (!kWithSlope) return {x * (S(1) + (-steepness * x).exp()).inverse()};
  const Block<S> sigmoid = (S(1) + (-steepness * x).exp()).inverse();
  return {x * sigmoid, sigmoid * (S(1) + steepness * x * (S(1) - sigmoid))};
}

// x * Phi(x), with the cumulative distribution function Phi of the normal distribution.
template <class S, bool kWithSlope>
ValueAndSlope<S> gelu(const Block<S>& x) {
  const Block<S> cdf = S(0.5) * (S(1) + x.unaryExpr([](S v) { return std::erf(v * S(M_SQRT1_2)); }));
  if constexpr (!kWithSlope) return {x * cdf};
  const Block<S> density = S(0.5 * M_2_SQRTPI * M_SQRT1_2) * (S(-0.5) * x.square()).exp();
  return {x * cdf, cdf + x * density};
}

// The approximation of gelu with tanh.
template <class S, bool kWithSlope>
ValueAndSlope<S> gelu_tanh(const Block<S>& x) {
  constexpr S scale = S(M_2_SQRTPI * M_SQRT1_2);
  constexpr S cubic = S(0.044715);
  const Block<S> tanh = (scale * (x + cubic * x.cube())).tanh();
  if constexpr (!kWithSlope) return {S(0.5) * x * (S(1) + tanh)};
  return {S(0.5) * x * (S(1) + tanh),
          S(0.5) * (S(1) + tanh) + S(0.5) * x * (S(1) - tanh.square()) * scale * (S(1) + S(3) * cubic * x.square())};
}

// Comparisons propagate NaN: x <= 0 is false for a NaN, which selects x.
template <class S, bool kWithSlope>
ValueAndSlope<S> activate(Activation activation, const Block<S>& x) {
  switch (activation) {
    case Activation::silu:
      return swish<S, kWithSlope>(x, S(1));
    case Activation::swigluoai:
      return swish<S, kWithSlope>(x, S(1.702));
    case Activation::gelu:
      return gelu<S, kWithSlope>(x);
    case Activation::gelu_tanh:
      return gelu_tanh<S, kWithSlope>(x);
    case Activation::relu:
      return {(x <= S(0)).select(S(0), x), (x > S(0)).template cast<S>()};
    case Activation::relu2: {
      const Block<S> positive = (x <= S(0)).select(S(0), x);
      return {positive.square(), S(2) * positive};
    }
  }
  return {};
}

// The activation of one block, activated = f(gate) * up, and its derivatives with respect to gate and up.
template <class S>
struct ActivatedBlock {
  Block<S> activated;
  Block<S> gate_slope = {};
  Block<S> up_slope = {};
};

// A limit of infinity means no clipping: the passes over the block that would clip it are skipped.
template <class S, bool kWithSlope>
ActivatedBlock<S> activate_gated(const ActivationKind& kind, const Block<S>& gate, const Block<S>& up) {
  const S limit = static_cast<S>(kind.limit);
  if (__builtin_isinf(limit) != 0 && kind.activation != Activation::swigluoai) {
    const ValueAndSlope<S> f = activate<S, kWithSlope>(kind.activation, gate);
    if constexpr (!kWithSlope) return {f.value * up};
    return {f.value * up, f.slope * up, f.value};
  }
  const S one = kind.activation == Activation::swigluoai ? S(1) : S(0);
  const Block<S> clipped_gate = gate.template min<Eigen::PropagateNaN>(limit);
  const Block<S> factor = one + up.template min<Eigen::PropagateNaN>(limit).template max<Eigen::PropagateNaN>(-limit);
  const ValueAndSlope<S> f = activate<S, kWithSlope>(kind.activation, clipped_gate);
  if constexpr (!kWithSlope) return {f.value * factor};
  return {f.value * factor, (gate > limit).select(S(0), f.slope * factor), (up.abs() > limit).select(S(0), f.value)};
}

// Reads and writes a block in the accumulator's type. The stride is 2 for interleaved gate and up.
template <class T>
Block<Accumulator<T>> load_block(const T* source, int64_t stride, int64_t size) {
  Block<Accumulator<T>> block(size);
  if (stride == 1) {
    widen_row(source, block.data(), size);
  } else {
    for (int64_t i = 0; i < size; ++i) block[i] = widen(source[i * stride]);
  }
  return block;
}

template <class T>
void store_block(const Block<Accumulator<T>>& block, T* target, int64_t stride) {
  if (stride == 1) {
    narrow_row<T>(block.data(), target, block.size());
  } else {
    for (int64_t i = 0; i < block.size(); ++i) target[i * stride] = narrow<T>(block[i]);
  }
}

// Activates columns [begin, begin + size) of a row of preactivations.
template <class T, bool kWithSlope>
ActivatedBlock<Accumulator<T>> activate_block(const ActivationKind& kind, const T* preactivations, int64_t width,
                                              int64_t begin, int64_t size) {
  using S = Accumulator<T>;
  const PreactivationColumns columns = preactivation_columns(kind.gate, width, begin);
  const Block<S> up = load_block(preactivations + columns.up, columns.stride, size);
  if (kind.gate != GateLayout::none) {
    const Block<S> gate = load_block(preactivations + columns.gate, columns.stride, size);
    return activate_gated<S, kWithSlope>(kind, gate, up);
  }
  ValueAndSlope<S> f = activate<S, kWithSlope>(kind.activation, up);
  return {f.value, {}, f.slope};
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
