// The activation as a template argument of a kernel: chosen at run time inside of the loop over numbers, it takes an
// indirect branch for each number.
#pragma once

#include "cuda/launch.h"
#include "kernels/experts/activation.h"

namespace maxmoe::cuda {

// In float32, with the approximations of the device.
struct ApproximateMath : NumberMath<float> {
  MAXMOE_DEVICE static float sigmoid(float x) { return approximate_inverse(1.0F + approximate_exp(-x)); }
};

// Approximations change activation and derivative by less than half a unit of 16-bit numbers (test_activate_rows.cpp).
// Not so for other activations: where the derivative is near 0, the difference of two functions loses digits.
constexpr bool is_approximate(Activation activation) {
  return activation == Activation::silu || activation == Activation::swigluoai;
}

// An activation of 16-bit numbers, with or without a gate and a limit.
template <Activation kActivation, bool kHasGate, bool kIsLimited>
struct ActivationForm {
  template <class T>
  using Math = std::conditional_t<is_approximate(kActivation), ApproximateMath, NumberMath<Accumulator<T>>>;

  static bool has(const ActivationKind& kind) {
    return kind.activation == kActivation && (kind.gate != GateLayout::none) == kHasGate &&
           (kIsLimited || std::isinf(kind.limit));
  }
  // The kind with the choices of this form, as constants.
  __device__ static ActivationKind fixed(ActivationKind kind) {
    kind.activation = kActivation;
    kind.gate = kHasGate ? GateLayout::separate : GateLayout::none;
    if (!kIsLimited) kind.limit = std::numeric_limits<double>::infinity();
    return kind;
  }
};

// Every activation, chosen at run time.
struct AnyForm {
  template <class T>
  using Math = NumberMath<Accumulator<T>>;
  __device__ static ActivationKind fixed(const ActivationKind& kind) { return kind; }
};

template <class... Forms, class Run>
void with_form_of(const ActivationKind& kind, const Run& run) {
  const bool is_found = (... || (Forms::has(kind) && (run.template operator()<Forms>(), true)));
  if (!is_found) run.template operator()<AnyForm>();
}

// Calls run.operator()<Form>() with the form of a kind: for 16-bit numbers all forms with approximations, and others
// that published models have. More of them would multiply the size of the library.
template <class T, class Run>
void with_form(const ActivationKind& kind, const Run& run) {
  using enum Activation;
  if constexpr (sizeof(T) == 2) {
    with_form_of<ActivationForm<silu, true, false>, ActivationForm<silu, true, true>,
                 ActivationForm<silu, false, false>, ActivationForm<swigluoai, true, true>,
                 ActivationForm<gelu, true, false>, ActivationForm<gelu_tanh, true, false>,
                 ActivationForm<relu2, false, false>>(kind, run);
  } else {
    run.template operator()<AnyForm>();
  }
}

// Whether gate and up alternate in rows that are aligned, so that a vector of each is in two vectors of memory.
template <class T>
bool alternate(const MatrixView<T>& gate, const MatrixView<T>& up) {
  const MatrixView<T> both{gate.data, gate.rows, 2 * gate.columns, gate.row_stride, 1};
  return gate.column_stride == 2 && up.column_stride == 2 && up.data == gate.data + 1 &&
         up.row_stride == gate.row_stride && is_aligned(both);
}
template <class T>
bool are_vectors(const ActivationKind& kind, const MatrixView<T>& gate, const MatrixView<T>& up) {
  if (kind.gate == GateLayout::none) return is_aligned(up);
  return (is_aligned(gate) && is_aligned(up)) || alternate(gate, up);
}

// Numbers of two vectors that alternate in memory.
template <class T, int kWidth>
__device__ void load_alternating(const T* from, T (&even)[kWidth], T (&odd)[kWidth]) {
  T halves[2][kWidth];
  load(from, halves[0]);
  load(from + kWidth, halves[1]);
  MAXMOE_UNROLL
  for (int i = 0; i < kWidth; ++i) {
    even[i] = halves[2 * i / kWidth][2 * i % kWidth];
    odd[i] = halves[(2 * i + 1) / kWidth][(2 * i + 1) % kWidth];
  }
}
template <class T, int kWidth>
__device__ void store_alternating(T* to, const T (&even)[kWidth], const T (&odd)[kWidth]) {
  T halves[2][kWidth];
  MAXMOE_UNROLL
  for (int i = 0; i < kWidth; ++i) {
    halves[2 * i / kWidth][2 * i % kWidth] = even[i];
    halves[(2 * i + 1) / kWidth][(2 * i + 1) % kWidth] = odd[i];
  }
  store(to, halves[0]);
  store(to + kWidth, halves[1]);
}

// Calls run.operator()<kWidth, Form>().
template <class T, class Run>
void with_width_and_form(bool is_vectorized, const ActivationKind& kind, const Run& run) {
  with_width<T>(is_vectorized, [&]<int kWidth>() {
    with_form<T>(kind, [&]<class Form>() { run.template operator()<kWidth, Form>(); });
  });
}

}  // namespace maxmoe::cuda
