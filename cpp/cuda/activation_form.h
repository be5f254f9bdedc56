// The activation as a template argument of a kernel: chosen at run time inside of the loop over numbers, it would take
// an indirect branch for each number.
#pragma once

#include "cuda/launch.h"
#include "kernels/experts/activation_formulas.h"

namespace maxmoe::cuda {

// In float32, with the approximations of the device.
struct ApproximateMath : NumberMath<float> {
  MAXMOE_DEVICE static float exp(float x) { return approximate_exp(x); }
  MAXMOE_DEVICE static float inverse(float x) { return approximate_inverse(x); }
};

// Approximations change activation and derivative by less than half a unit of 16-bit numbers (test_activate_rows.cpp).
// Not so for other activations: where the derivative is near 0, the difference of two functions loses digits.
constexpr bool is_approximate(Activation activation) {
  return activation == Activation::silu || activation == Activation::swigluoai;
}
template <class T, Activation kActivation>
using ActivationMath =
    std::conditional_t<sizeof(T) == 2 && is_approximate(kActivation), ApproximateMath, NumberMath<Accumulator<T>>>;

// An activation, with or without a gate and a limit.
template <Activation kTheActivation, bool kHasGate, bool kIsLimited>
struct ActivationForm {
  static constexpr Activation kActivation = kTheActivation;

  // The kind with the choices of this form, as constants.
  __device__ static ActivationKind fixed(ActivationKind kind) {
    kind.activation = kActivation;
    kind.gate = kHasGate ? GateLayout::separate : GateLayout::none;
    if (!kIsLimited) kind.limit = std::numeric_limits<double>::infinity();
    return kind;
  }
};

template <Activation kActivation, class Run>
void with_form(const ActivationKind& kind, const Run& run) {
  if constexpr (needs_gate(kActivation)) {
    return run.template operator()<ActivationForm<kActivation, true, kActivation == Activation::swigluoai>>();
  } else {
    if (kind.gate == GateLayout::none) return run.template operator()<ActivationForm<kActivation, false, false>>();
    if (std::isinf(kind.limit)) return run.template operator()<ActivationForm<kActivation, true, false>>();
    return run.template operator()<ActivationForm<kActivation, true, true>>();
  }
}

// Calls run.operator()<Form>() with the form of a kind.
template <class Run>
void with_form(const ActivationKind& kind, const Run& run) {
  switch (kind.activation) {
    case Activation::silu:
      return with_form<Activation::silu>(kind, run);
    case Activation::gelu:
      return with_form<Activation::gelu>(kind, run);
    case Activation::gelu_tanh:
      return with_form<Activation::gelu_tanh>(kind, run);
    case Activation::relu:
      return with_form<Activation::relu>(kind, run);
    case Activation::relu2:
      return with_form<Activation::relu2>(kind, run);
    case Activation::swigluoai:
      return with_form<Activation::swigluoai>(kind, run);
    case Activation::situ:
      return with_form<Activation::situ>(kind, run);
  }
}

// Calls run.operator()<kWidth, Form>().
template <class T, class Run>
void with_width_and_form(bool is_vectorized, const ActivationKind& kind, const Run& run) {
  with_width<T>(is_vectorized,
                [&]<int kWidth>() { with_form(kind, [&]<class Form>() { run.template operator()<kWidth, Form>(); }); });
}

}  // namespace maxmoe::cuda
