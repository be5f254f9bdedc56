// Which activation the experts apply, and where their gate is.
#pragma once

namespace maxmoe {

enum class Activation { silu, gelu, gelu_tanh, relu, relu2, swigluoai };

// Where the gate is: nowhere; in matrices of its own; in those of up, before its columns or in turn with them.
enum class GateLayout { none, separate, concatenated, interleaved };

struct ActivationKind {
  Activation activation;
  GateLayout gate;
  double limit;  // gate is clipped from above, up on both sides; infinity for no clipping
};

}  // namespace maxmoe
