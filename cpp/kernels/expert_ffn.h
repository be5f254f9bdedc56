// The experts as one operator: gather, up and gate, activation, down, weighted sum.
#pragma once

#include "dtype.h"
#include "executor.h"
#include "gemm.h"

namespace maxmoe {

enum class Activation { silu, gelu, gelu_tanh, relu, relu2, swigluoai };

// Where the gate is: nowhere; in matrices of its own; in those of up, before its columns or in turn with them.
enum class GateLayout { none, separate, concatenated, interleaved };

struct ActivationKind {
  Activation activation;
  GateLayout gate;
  double limit;  // gate is clipped from above, up on both sides; infinity for no clipping
};

template <class T>
struct ExpertWeights {
  ConstMatrixStack<T> gate;      // [L, D, F]; empty unless separate
  ConstMatrixStack<T> up;        // [L, D, F], or with the gate [L, D, 2F]
  ConstMatrixStack<T> down;      // [L, F, D]
  ConstMatrixView<T> gate_bias;  // [L, F] or empty, as the next two
  ConstMatrixView<T> up_bias;    // [L, F] or [L, 2F]
  ConstMatrixView<T> down_bias;  // [L, D]
};

// The rows of the routed slots, as ragged_plan lays them out.
struct RoutedRows {
  const int64_t* slots;        // [R]
  const int64_t* row_of_slot;  // [T * K], -1 for a slot without a row
  const int64_t* group_sizes;  // [L], sum = R
  int64_t num_groups;          // L
  int64_t top_k;
};

// With x_r the token of row r, Z = x_r [gate | up] + biases (interleaved when the weights are), A = activation(Z), y_r
// = A down + bias: out[t] = sum_k weights[t, k] * y[row of slot (t, k)].
template <class T>
struct ExpertFfn {
  ConstMatrixView<T> x;           // [T, D]
  const Accumulator<T>* weights;  // [T * K] or null for ones
  RoutedRows routed;
  ExpertWeights<T> experts;
  ActivationKind kind;
  const Gemm<T>* gemm;
  MatrixView<T> preactivations;  // Z [R, 2F] ([R, F] when not gated), or empty: not wanted
  MatrixView<T> rows;            // y [R, D], work space
  MatrixView<T> out;             // [T, D]
};

// With dO the gradient of out, dA' = dO_t down^T: the gradient of weights is <dA', A> + <dO_t, bias>, and nothing of
// the size [R, D] need be kept from the forward pass. Outputs that are null or empty are not computed, so that a caller
// can take them in several calls, and free in between what it needs no more: the first one turns Z into dZ and fills
// activated and grad_weights, the others continue.
template <class T>
struct ExpertFfnBackward {
  ConstMatrixView<T> grad_out;    // dO [T, D]
  ConstMatrixView<T> x;           // [T, D]
  const Accumulator<T>* weights;  // [T * K] or null for ones
  RoutedRows routed;
  ExpertWeights<T> experts;
  ActivationKind kind;
  const Gemm<T>* gemm;
  bool continues;                // dZ and weights * A are there already
  MatrixView<T> preactivations;  // Z, overwritten with dZ
  MatrixView<T> activated;       // weights * A [R, F], work space; empty when nobody wants grad_down
  MatrixView<T> grad_rows;       // [R, D], work space; empty when grad_x is

  MatrixView<T> grad_x;          // [T, D]
  Accumulator<T>* grad_weights;  // [T * K]
  MatrixStack<T> grad_gate;
  MatrixStack<T> grad_up;
  MatrixStack<T> grad_down;
  MatrixView<T> grad_gate_bias;
  MatrixView<T> grad_up_bias;
  MatrixView<T> grad_down_bias;
};

}  // namespace maxmoe

MAXMOE_KERNEL(expert_ffn, ExpertFfn)
MAXMOE_KERNEL(expert_ffn_backward, ExpertFfnBackward)
