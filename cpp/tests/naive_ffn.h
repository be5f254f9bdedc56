// The experts in plain float64 loops, and the same tensors as arguments of the kernels.
#pragma once

#include <cmath>
#include <limits>
#include <vector>

#include "kernels/experts/expert_ffn.h"
#include "matrix.h"
#include "routing.h"

namespace maxmoe {

struct FfnShape {
  Routing routing;
  int64_t hidden_size;        // D
  int64_t intermediate_size;  // F
};

// The tensors of the experts. Also used for a direction in which they are differentiated.
template <class T>
struct FfnTensors {
  explicit FfnTensors(const FfnShape& s)
      : x(s.routing.num_tokens, s.hidden_size),
        weights(1, s.routing.num_tokens * s.routing.top_k),
        gate(s.routing.num_experts * s.hidden_size, s.intermediate_size),
        up(s.routing.num_experts * s.hidden_size, s.intermediate_size),
        down(s.routing.num_experts * s.intermediate_size, s.hidden_size),
        gate_bias(s.routing.num_experts, s.intermediate_size),
        up_bias(s.routing.num_experts, s.intermediate_size),
        down_bias(s.routing.num_experts, s.hidden_size) {}

  // Random tensors. The weights are scaled so that every preactivation and output is of size 1.
  static FfnTensors random(const FfnShape& shape, unsigned seed) {
    FfnTensors tensors(shape);
    tensors.for_each([&](auto& matrix) { matrix.randomize(seed++); });
    const double bound = std::sqrt(3.0 / static_cast<double>(shape.hidden_size));
    tensors.gate.randomize(seed++, bound);
    tensors.up.randomize(seed++, bound);
    tensors.down.randomize(seed++, std::sqrt(3.0 / static_cast<double>(shape.intermediate_size)));
    return tensors;
  }

  // Copies tensors of another type.
  template <class S>
  explicit FfnTensors(const FfnTensors<S>& other)
      : x(other.x),
        weights(other.weights),
        gate(other.gate),
        up(other.up),
        down(other.down),
        gate_bias(other.gate_bias),
        up_bias(other.up_bias),
        down_bias(other.down_bias) {}

  template <class Visit>
  void for_each(const Visit& visit) {
    visit(x);
    visit(weights);
    for (Matrix<T>* matrix : {&gate, &up, &down, &gate_bias, &up_bias, &down_bias}) visit(*matrix);
  }

  Matrix<T> x;
  Matrix<Accumulator<T>> weights;
  Matrix<T> gate, up, down, gate_bias, up_bias, down_bias;
};

// Column of element f of gate or up in a matrix that holds both.
inline int64_t fused_column(GateLayout layout, int64_t intermediate_size, bool is_up, int64_t f) {
  if (layout == GateLayout::interleaved) return 2 * f + (is_up ? 1 : 0);
  return is_up ? intermediate_size + f : f;
}

// The matrices of the experts, or their gradients, in the layout of the gate that the kernels get.
template <class T>
class Projections {
 public:
  Projections(GateLayout layout, const FfnTensors<T>& tensors, int64_t num_experts)
      : layout_(layout),
        num_experts_(num_experts),
        gate_(tensors.gate),
        up_(is_fused() ? fused(tensors.gate, tensors.up) : tensors.up),
        gate_bias_(tensors.gate_bias),
        up_bias_(is_fused() ? fused(tensors.gate_bias, tensors.up_bias) : tensors.up_bias) {}

  ExpertProjections<T> experts(const FfnTensors<T>& tensors, bool biased) const {
    ExpertProjections<T> e;
    if (layout_ == GateLayout::separate) e.gate.weights = stack(gate_, num_experts_);
    e.up.weights = stack(up_, num_experts_);
    e.down.weights = stack(tensors.down, num_experts_);
    if (biased && layout_ == GateLayout::separate) e.gate.bias = gate_bias_.view();
    if (biased) e.up.bias = up_bias_.view();
    if (biased) e.down.bias = tensors.down_bias.view();
    return e;
  }

  void collect_into(ExpertFfnBackwardUp<T>& a, bool biased) {
    if (layout_ == GateLayout::separate) a.gate.weights = stack(gate_, num_experts_);
    a.up.weights = stack(up_, num_experts_);
    if (biased && layout_ == GateLayout::separate) a.gate.bias = gate_bias_.view();
    if (biased) a.up.bias = up_bias_.view();
  }

  void copy_to(FfnTensors<T>& tensors) const {
    tensors.gate = is_fused() ? part(up_, false) : gate_;
    tensors.up = is_fused() ? part(up_, true) : up_;
    tensors.gate_bias = is_fused() ? part(up_bias_, false) : gate_bias_;
    tensors.up_bias = is_fused() ? part(up_bias_, true) : up_bias_;
  }

 private:
  bool is_fused() const { return layout_ == GateLayout::concatenated || layout_ == GateLayout::interleaved; }

  Matrix<T> fused(Matrix<T> gate, Matrix<T> up) const {
    Matrix<T> both(gate.rows(), 2 * gate.columns());
    for (int64_t r = 0; r < gate.rows(); ++r) {
      for (int64_t f = 0; f < gate.columns(); ++f) {
        both.element(r, fused_column(layout_, gate.columns(), false, f)) = gate.element(r, f);
        both.element(r, fused_column(layout_, gate.columns(), true, f)) = up.element(r, f);
      }
    }
    return both;
  }

  Matrix<T> part(Matrix<T> both, bool is_up) const {
    const int64_t width = both.columns() / 2;
    Matrix<T> half(both.rows(), width);
    for (int64_t r = 0; r < both.rows(); ++r) {
      for (int64_t f = 0; f < width; ++f) half.element(r, f) = both.element(r, fused_column(layout_, width, is_up, f));
    }
    return half;
  }

  GateLayout layout_;
  int64_t num_experts_;
  Matrix<T> gate_, up_, gate_bias_, up_bias_;
};

inline RoutedRows routed_rows(const Routing& routing) {
  return {routing.slots.data(), routing.rows.data(), routing.group_sizes.data(), routing.num_experts, routing.top_k};
}

// Every activation, with and without the limits and layouts that it may have. No limit is representable in 16 bits: at
// a value equal to the limit the two one-sided derivatives differ.
inline std::vector<ActivationKind> activation_kinds() {
  constexpr double kNoLimit = std::numeric_limits<double>::infinity();
  return {
      {Activation::silu, GateLayout::separate, kNoLimit},
      {Activation::silu, GateLayout::separate, 0.55},
      {Activation::gelu, GateLayout::separate, kNoLimit},
      {Activation::gelu_tanh, GateLayout::separate, kNoLimit},
      {Activation::relu, GateLayout::separate, 0.9},
      {Activation::swigluoai, GateLayout::separate, 0.7},
      {Activation::silu, GateLayout::concatenated, kNoLimit},
      {Activation::swigluoai, GateLayout::interleaved, 0.7},
      {Activation::silu, GateLayout::interleaved, kNoLimit},
      {Activation::relu2, GateLayout::none, kNoLimit},
      {Activation::silu, GateLayout::none, kNoLimit},
      {Activation::gelu_tanh, GateLayout::none, kNoLimit},
      {Activation::swigluoai, GateLayout::concatenated, kNoLimit},
      {Activation::relu2, GateLayout::interleaved, 0.7},
      {Activation::silu, GateLayout::separate, 0.2, LimitTarget::output},
      {Activation::gelu, GateLayout::interleaved, 0.3, LimitTarget::output},
      {Activation::situ, GateLayout::separate, kNoLimit, LimitTarget::input, 0.6, 0.9},
      {Activation::situ, GateLayout::concatenated, kNoLimit, LimitTarget::input, 4.0, 0.5},
  };
}

inline double naive_activation(const ActivationKind& kind, double x) {
  switch (kind.activation) {
    case Activation::silu:
      return x / (1.0 + std::exp(-x));
    case Activation::swigluoai:
      return x / (1.0 + std::exp(-1.702 * x));
    case Activation::gelu:
      return x * 0.5 * (1.0 + std::erf(x / std::sqrt(2.0)));
    case Activation::gelu_tanh:
      return 0.5 * x * (1.0 + std::tanh(std::sqrt(2.0 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::relu:
      return std::max(x, 0.0);
    case Activation::relu2:
      return std::max(x, 0.0) * std::max(x, 0.0);
    case Activation::situ:
      return kind.gate_softcap * std::tanh(x / kind.gate_softcap) / (1.0 + std::exp(-x));
  }
  return std::numeric_limits<double>::quiet_NaN();
}

inline double naive_factor(const ActivationKind& kind, double up) {
  if (kind.activation == Activation::situ) return kind.up_softcap * std::tanh(up / kind.up_softcap);
  const double clipped = std::min(std::max(up, -kind.limit), kind.limit);
  return kind.activation == Activation::swigluoai ? clipped + 1.0 : clipped;
}

inline double naive_activated(const ActivationKind& kind, double gate, double up) {
  if (kind.gate == GateLayout::none) return naive_activation(kind, up);
  const double active = kind.limit_target == LimitTarget::output ? std::min(naive_activation(kind, gate), kind.limit)
                                                                 : naive_activation(kind, std::min(gate, kind.limit));
  return active * naive_factor(kind, up);
}

// Computes out [T, D] for the tensors `at + step * along`.
template <class T>
class NaiveFfn {
 public:
  NaiveFfn(const FfnShape& shape, const ActivationKind& kind, bool biased, bool weighted, const FfnTensors<T>& at,
           const FfnTensors<T>& along)
      : shape_(shape), kind_(kind), biased_(biased), weighted_(weighted), at_(at), along_(along) {}

  Matrix<double> operator()(double step) const {
    const Routing& routing = shape_.routing;
    Matrix<double> out(routing.num_tokens, shape_.hidden_size);
    for (int64_t t = 0; t < routing.num_tokens; ++t) {
      for (int64_t d = 0; d < shape_.hidden_size; ++d) out.element(t, d) = 0.0;
      for (int64_t slot = t * routing.top_k; slot < (t + 1) * routing.top_k; ++slot) {
        const int64_t expert = routing.experts[static_cast<size_t>(slot)];
        if (expert >= 0) add_expert(expert, t, slot, step, out);
      }
    }
    return out;
  }

 private:
  template <class S>
  static double value(const Matrix<S>& at, const Matrix<S>& along, double step, int64_t r, int64_t c) {
    return at(r, c) + (step == 0.0 ? 0.0 : step * along(r, c));
  }

  // Element f of (row t of x) * (matrix of one expert) + bias.
  double project(const Matrix<T> FfnTensors<T>::* matrix, const Matrix<T> FfnTensors<T>::* bias, int64_t expert,
                 int64_t t, int64_t f, double step) const {
    double sum = biased_ ? value(at_.*bias, along_.*bias, step, expert, f) : 0.0;
    for (int64_t d = 0; d < shape_.hidden_size; ++d) {
      sum += value(at_.x, along_.x, step, t, d) *
             value(at_.*matrix, along_.*matrix, step, expert * shape_.hidden_size + d, f);
    }
    return sum;
  }

  void add_expert(int64_t expert, int64_t t, int64_t slot, double step, Matrix<double>& out) const {
    const double weight = weighted_ ? value(at_.weights, along_.weights, step, 0, slot) : 1.0;
    for (int64_t d = 0; d < shape_.hidden_size && biased_; ++d) {
      out.element(t, d) += weight * value(at_.down_bias, along_.down_bias, step, expert, d);
    }
    for (int64_t f = 0; f < shape_.intermediate_size; ++f) {
      const double gate = project(&FfnTensors<T>::gate, &FfnTensors<T>::gate_bias, expert, t, f, step);
      const double up = project(&FfnTensors<T>::up, &FfnTensors<T>::up_bias, expert, t, f, step);
      const double activated = naive_activated(kind_, gate, up);
      for (int64_t d = 0; d < shape_.hidden_size; ++d) {
        const int64_t row = expert * shape_.intermediate_size + f;
        out.element(t, d) += weight * activated * value(at_.down, along_.down, step, row, d);
      }
    }
  }

  const FfnShape& shape_;
  ActivationKind kind_;
  bool biased_;
  bool weighted_;
  const FfnTensors<T>& at_;
  const FfnTensors<T>& along_;
};

}  // namespace maxmoe
