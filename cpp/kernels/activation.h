// The experts' activations on blocks of one row. Only for the .cpp files that are compiled per instruction set.
#pragma once

#include <Eigen/Core>
#include <cmath>

#include "expert_ffn.h"
#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// A block of a row, on the stack.
template <class S>
using Block = Eigen::Array<S, Eigen::Dynamic, 1, Eigen::ColMajor, kColumnBlock, 1>;

// value = f(x), slope = f'(x)
template <class S>
struct ValueAndSlope {
  Block<S> value;
  Block<S> slope;
};

// x * sigmoid(steepness * x)
template <class S>
ValueAndSlope<S> swish(const Block<S>& x, S steepness) {
  const Block<S> sigmoid = (S(1) + (-steepness * x).exp()).inverse();
  return {x * sigmoid, sigmoid * (S(1) + steepness * x * (S(1) - sigmoid))};
}

template <class S>
ValueAndSlope<S> gelu(const Block<S>& x) {
  const Block<S> cdf = S(0.5) * (S(1) + x.unaryExpr([](S v) { return std::erf(v * S(M_SQRT1_2)); }));
  const Block<S> density = S(0.5 * M_2_SQRTPI * M_SQRT1_2) * (S(-0.5) * x.square()).exp();
  return {x * cdf, cdf + x * density};
}

template <class S>
ValueAndSlope<S> gelu_tanh(const Block<S>& x) {
  constexpr S scale = S(M_2_SQRTPI * M_SQRT1_2);
  constexpr S cubic = S(0.044715);
  const Block<S> tanh = (scale * (x + cubic * x.cube())).tanh();
  return {S(0.5) * x * (S(1) + tanh),
          S(0.5) * (S(1) + tanh) + S(0.5) * x * (S(1) - tanh.square()) * scale * (S(1) + S(3) * cubic * x.square())};
}

// Comparisons are written so that a NaN stays one.
template <class S>
ValueAndSlope<S> activate(Activation activation, const Block<S>& x) {
  switch (activation) {
    case Activation::silu:
      return swish<S>(x, S(1));
    case Activation::swigluoai:
      return swish<S>(x, S(1.702));
    case Activation::gelu:
      return gelu<S>(x);
    case Activation::gelu_tanh:
      return gelu_tanh<S>(x);
    case Activation::relu:
      return {(x <= S(0)).select(S(0), x), (x > S(0)).template cast<S>()};
    case Activation::relu2: {
      const Block<S> positive = (x <= S(0)).select(S(0), x);
      return {positive.square(), S(2) * positive};
    }
  }
  return {};
}

// What the activation does to one block: activated = f(gate) * up, and its slopes in gate and up.
template <class S>
struct ActivatedBlock {
  Block<S> activated;
  Block<S> gate_slope;
  Block<S> up_slope;
};

template <class S>
ActivatedBlock<S> activate_ungated(Activation activation, const Block<S>& up) {
  ValueAndSlope<S> f = activate<S>(activation, up);
  return {f.value, {}, f.slope};
}

template <class S>
ActivatedBlock<S> activate_gated(Activation activation, S limit, const Block<S>& gate, const Block<S>& up) {
  const Block<S> clipped_gate = (gate > limit).select(limit, gate);
  Block<S> factor = (up > limit).select(limit, (up < -limit).select(-limit, up));
  if (activation == Activation::swigluoai) factor += S(1);
  const ValueAndSlope<S> f = activate<S>(activation, clipped_gate);
  return {f.value * factor, (gate > limit).select(S(0), f.slope * factor), (up.abs() > limit).select(S(0), f.value)};
}

// Columns [begin, begin + size) of a row of preactivations: gate | up, or up alone.
template <class T>
ActivatedBlock<Accumulator<T>> activate_block(const ActivationKind& kind, const T* preactivations, int64_t width,
                                              int64_t begin, int64_t size) {
  using S = Accumulator<T>;
  Block<S> up(size);
  widen_row(preactivations + (kind.gated ? width : 0) + begin, up.data(), size);
  if (!kind.gated) return activate_ungated<S>(kind.activation, up);
  Block<S> gate(size);
  widen_row(preactivations + begin, gate.data(), size);
  return activate_gated<S>(kind.activation, static_cast<S>(kind.limit), gate, up);
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
