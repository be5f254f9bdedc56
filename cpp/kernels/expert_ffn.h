// The experts of a layer as one operator: gather, up and gate, activation, down, weighted sum.
//
// The unit of work is a tile: rows of one expert. Its tokens are read by index, multiplied with gate and up, activated
// and multiplied with down while they are in a cache. The only tensors with a row per routed slot that are written are
// y and, if a gradient is needed, Z.
#pragma once

#include "activation_kind.h"
#include "dtype.h"
#include "executor.h"
#include "gemm.h"

namespace maxmoe {

template <class T>
struct ExpertWeights {
  ConstMatrixStack<T> gate;      // [L, D, F]; empty unless separate
  ConstMatrixStack<T> up;        // [L, D, F], or with the gate [L, D, 2F]
  ConstMatrixStack<T> down;      // [L, F, D]
  ConstMatrixView<T> gate_bias;  // [L, F]; each bias may be empty
  ConstMatrixView<T> up_bias;    // [L, F] or [L, 2F]
  ConstMatrixView<T> down_bias;  // [L, D]
};

// The rows of the routed slots, as ragged_plan orders them.
struct RoutedRows {
  const int64_t* slots;        // [R]
  const int64_t* row_of_slot;  // [T * K], -1 for a slot without a row
  const int64_t* group_sizes;  // [L], sum = R
  int64_t num_groups;          // L
  int64_t top_k;
};

// Forward pass. For row r let x_r be its token, Z = x_r [gate | up] + biases (interleaved if the weights are), A =
// activation(Z) and y_r = A down + bias. The result is out[t] = sum_k weights[t, k] * y[row of slot (t, k)].
template <class T>
struct ExpertFfn {
  ConstMatrixView<T> x;           // [T, D]
  const Accumulator<T>* weights;  // [T * K] or null for ones
  RoutedRows routed;
  ExpertWeights<T> experts;
  ActivationKind kind;
  const Gemm<T>* gemm;
  MatrixView<T> preactivations;  // Z [R, 2F], [R, F] without a gate; or empty: not stored
  MatrixView<T> rows;            // y [R, D], work space
  MatrixView<T> out;             // [T, D]; if out and rows are empty, only Z is computed, with the same bits
};

// Backward pass, with dO the gradient of out. It has three kernels, so that the caller can free between them the
// tensors that the next one does not need. Nothing of shape [R, D] is kept from the forward pass: with dA = dO_t down^T
// the gradient of weights is <dA, A> + <dO_t, bias>. Results that are null or empty are not computed.

// From dO to the gradients of weights and down. The preactivations Z become dZ = weights * dA * activation'(Z) in
// place, which saves memory of shape [R, 2F]. The gradients of down and its bias need neither dA nor dZ.
template <class T>
struct ExpertFfnBackwardDown {
  ConstMatrixView<T> grad_out;    // dO [T, D]
  const Accumulator<T>* weights;  // [T * K] or null for ones
  RoutedRows routed;
  ConstMatrixStack<T> down;      // [L, F, D]
  ConstMatrixView<T> down_bias;  // [L, D] or empty
  ActivationKind kind;
  const Gemm<T>* gemm;
  MatrixView<T> preactivations;  // Z, overwritten with dZ
  bool keeps_preactivations;     // computes neither dA nor dZ; grad_weights must be null
  MatrixView<T> activated;       // weights * A [R, F], work space; empty when grad_down is

  Accumulator<T>* grad_weights;  // [T * K]; not written for a slot without a row
  MatrixStack<T> grad_down;
  MatrixView<T> grad_down_bias;
};

// From dZ to the gradient of x.
template <class T>
struct ExpertFfnBackwardInput {
  ConstMatrixView<T> grad_preactivations;  // dZ [R, 2F]
  RoutedRows routed;
  ConstMatrixStack<T> gate;  // [L, D, F]; empty unless separate
  ConstMatrixStack<T> up;    // [L, D, F], or with the gate [L, D, 2F]
  const Gemm<T>* gemm;
  MatrixView<T> rows;  // dZ [gate | up]^T [R, D], work space

  MatrixView<T> grad_x;  // [T, D]
};

// From dZ to the gradients of gate and up.
template <class T>
struct ExpertFfnBackwardUp {
  ConstMatrixView<T> x;                    // [T, D]
  ConstMatrixView<T> grad_preactivations;  // dZ [R, 2F]
  int64_t gate_width;                      // columns of dZ that belong to a separate gate; the others belong to up
  RoutedRows routed;
  const Gemm<T>* gemm;

  MatrixStack<T> grad_gate;
  MatrixStack<T> grad_up;
  MatrixView<T> grad_gate_bias;
  MatrixView<T> grad_up_bias;
};

}  // namespace maxmoe

MAXMOE_KERNEL(expert_ffn, ExpertFfn)
MAXMOE_KERNEL(expert_ffn_backward_down, ExpertFfnBackwardDown)
MAXMOE_KERNEL(expert_ffn_backward_input, ExpertFfnBackwardInput)
MAXMOE_KERNEL(expert_ffn_backward_up, ExpertFfnBackwardUp)
