// The activation of the experts, and the layout of gate and up in memory.
#pragma once

#include <cstdint>

#include "kernels/isa/isa.h"

namespace maxmoe {

enum class Activation { silu, gelu, gelu_tanh, relu, relu2, swigluoai, situ };

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

}  // namespace maxmoe
