// Which activation the experts apply, and where their gate is.
#pragma once

namespace maxmoe {

enum class Activation { silu, gelu, gelu_tanh, relu, relu2, swigluoai };

// Where the gate projection is stored: there is none; in matrices of its own; or in the matrices of up, before their
// columns (concatenated) or alternating with them (interleaved).
enum class GateLayout { none, separate, concatenated, interleaved };

struct ActivationKind {
  Activation activation;
  GateLayout gate;
  double limit;  // gate is clipped to (-inf, limit], up to [-limit, limit]; infinity: no clipping
};

}  // namespace maxmoe
