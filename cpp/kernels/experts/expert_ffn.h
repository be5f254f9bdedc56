// The experts of a layer as one operator: gather, up and gate, activation, down, weighted sum.
//
// The unit of work is a tile: rows of one expert. Its tokens are read by index, multiplied with gate and up, activated
// and multiplied with down while they are in a cache. The only tensors with a row per routed slot that are written are
// y and, if a gradient is needed, Z.
#pragma once

#include "kernels/executor.h"
#include "kernels/experts/activation.h"
#include "kernels/matrix/dtype.h"
#include "kernels/product/projection.h"

namespace maxmoe {

template <class T>
struct ExpertProjections {
  Projection<T> gate;  // [L, D, F]; empty unless separate
  Projection<T> up;    // [L, D, F], or with the gate [L, D, 2F]
  Projection<T> down;  // [L, F, D]
};

// The reduced rows of the low-rank factors, or their gradients, side by side: gate, up and down.
template <class T>
struct ReducedRows {
  MatrixView<T> gate, up, down;  // [R, r of the factors]

  MAXMOE_INLINE ReducedRows row_range(int64_t begin, int64_t end) const {
    return {gate.row_range(begin, end), up.row_range(begin, end), down.row_range(begin, end)};
  }
  MAXMOE_INLINE bool empty() const { return gate.data == nullptr; }
};

// The rows of the routed slots, as ragged_plan orders them.
struct RoutedRows {
  const int64_t* slots;        // [R]
  const int64_t* row_of_slot;  // [T * K], -1 for a slot without a row
  const int64_t* group_sizes;  // [L], sum = R
  int64_t num_groups;          // L
  int64_t top_k;
};

// The inputs of the kernels of expert_ffn; comments name the ones that a kernel does not read. Results are empty unless
// a caller sets them.
template <class T>
struct ExpertFfnCall {
  ConstMatrixView<T> x;           // [T, D]
  const Accumulator<T>* weights;  // [T * K] or null for ones
  RoutedRows routed;
  ExpertProjections<T> experts;
  ActivationKind kind;
  const Gemm<T>* gemm;
};

// Forward pass. For row r let x_r be its token, Z = x_r [gate | up] + biases (interleaved if the weights are), A =
// activation(Z) and y_r = A down + bias. The result is out[t] = sum_k weights[t, k] * y[row of slot (t, k)]. With
// low-rank factors, gate, up and down stand for gate + a b and so on.
template <class T>
struct ExpertFfn : ExpertFfnCall<T> {
  MatrixView<T> preactivations{};  // Z [R, 2F], [R, F] without a gate; or empty: not stored
  ReducedRows<T> reduced{};        // x a and A a; or empty: not stored
  MatrixView<T> rows{};            // y [R, D], work space
  MatrixView<T> out{};  // [T, D]; if out and rows are empty, only Z and `reduced` are computed, with the same bits
};

// Backward pass, with dO the gradient of out. It has three kernels, and one for the low-rank factors of down, so that
// the caller can free between them the tensors that the next one does not need. Nothing of shape [R, D] is kept from
// the forward pass: with dA = dO_t down^T the gradient of weights is <dA, A> + <dO_t, bias>. Results that are null or
// empty are not computed.
//
// The gradient of a reduced row x a is g b^T, where g is the gradient of the product. It has r columns. The gradient of
// x is g W^T + (g b^T) a^T, the gradient of `a` the sum of x^T (g b^T) over the rows, and the gradient of `b` the sum
// of (x a)^T g.

// From dO and Z to the gradients of the reduced rows of down and of its factor `a`. It runs first, while Z is
// still there: A is computed again, in blocks of columns, so that no tensor of shape [R, F] is needed.
template <class T>
struct ExpertFfnBackwardDownFactors : ExpertFfnCall<T> {  // x, gate and up are not read
  ConstMatrixView<T> grad_out{};                          // dO [T, D]
  ConstMatrixView<T> preactivations{};                    // Z
  ConstMatrixView<T> reduced{};                           // A a [R, r]; read for weighted_reduced

  MatrixView<T> grad_reduced{};      // dO b^T [R, r], without weights
  MatrixView<T> weighted_reduced{};  // weights * (A a) [R, r]
  MatrixStack<T> grad_a{};           // [L, F, r]; needs grad_reduced
};

// From dO to the gradients of weights and down. The preactivations Z become dZ = weights * dA * activation'(Z) in
// place, which saves memory of shape [R, 2F]. The gradients of down and its bias need neither dA nor dZ.
template <class T>
struct ExpertFfnBackwardDown : ExpertFfnCall<T> {  // x, gate and up are not read
  ConstMatrixView<T> grad_out{};                   // dO [T, D]
  ConstMatrixView<T> grad_reduced{};               // as computed by ExpertFfnBackwardDownFactors; read for dA
  ConstMatrixView<T> weighted_reduced{};           // the same; read for grad_b
  MatrixView<T> preactivations{};                  // Z, overwritten with dZ
  bool keeps_preactivations{};                     // computes neither dA nor dZ; grad_weights must be null
  MatrixView<T> activated{};                       // weights * A [R, F], work space; empty when grad_down is

  Accumulator<T>* grad_weights{};  // [T * K]; not written for a slot without a row
  MatrixStack<T> grad_down{};
  MatrixStack<T> grad_b{};  // [L, r, D]
  MatrixView<T> grad_bias{};
};

// From dZ to the gradients of x and of the reduced rows of gate and up.
template <class T>
struct ExpertFfnBackwardInput : ExpertFfnCall<T> {  // x, weights and down are not read
  ConstMatrixView<T> grad_preactivations{};         // dZ [R, 2F]
  MatrixView<T> rows{};                             // dZ [gate | up]^T [R, D], work space; empty when grad_x is

  ReducedRows<T> grad_reduced{};  // gradients for gate and up, with factors; `down` is not read
  MatrixView<T> grad_x{};         // [T, D]
};

// The gradients of a projection of the tokens. Empty ones are not computed.
template <class T>
struct TokenProjectionGradients {
  ConstMatrixView<T> reduced;  // gradient of the reduced rows [R, r]; read for `a`
  MatrixStack<T> weights;      // [L, D, F]
  MatrixStack<T> a;            // [L, D, r]
  MatrixView<T> bias;          // [L, F]
};

// From dZ to the gradients of gate and up, except for their factors `b`: those are products of the reduced rows and dZ
// (tgmm.h).
template <class T>
struct ExpertFfnBackwardUp : ExpertFfnCall<T> {  // weights and down are not read
  ConstMatrixView<T> grad_preactivations{};      // dZ [R, 2F]: the columns of a separate gate, then of up
  TokenProjectionGradients<T> gate{};
  TokenProjectionGradients<T> up{};
};

}  // namespace maxmoe

MAXMOE_KERNEL(expert_ffn, ExpertFfn)
MAXMOE_KERNEL(expert_ffn_backward_down_factors, ExpertFfnBackwardDownFactors)
MAXMOE_KERNEL(expert_ffn_backward_down, ExpertFfnBackwardDown)
MAXMOE_KERNEL(expert_ffn_backward_input, ExpertFfnBackwardInput)
MAXMOE_KERNEL(expert_ffn_backward_up, ExpertFfnBackwardUp)
