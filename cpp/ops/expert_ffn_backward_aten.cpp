// The backward pass of expert_ffn through ATen.
//
// Three products take the weight w of a row: the sum of the gradients of a token's rows, and the gradients of the
// matrices. Their rows of D numbers are multiplied by w when they are gathered or added up, which takes no pass of its
// own. So the gradients of activations and preactivations, rows of F numbers, are those without w.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include "ops/expert_ffn_steps.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// The gradient of the rows that `project` multiplied, if it is wanted, and of its reduced rows.
Projected project_backward(const Tensor& grad, const Weights& matrices, const Factors& factors, bool wants_rows,
                           const Steps& steps) {
  const auto transposed = [](const OptionalTensor& factor) {
    return factor.has_value() ? OptionalTensor(factor->transpose(1, 2)) : std::nullopt;
  };
  const OptionalTensor expand = transposed(factors.a);
  const OptionalTensor reduce = transposed(factors.b);
  if (!wants_rows) return {Tensor(), steps.multiply_rows(grad, {*reduce}, std::nullopt)};
  return project(grad, matrices.transposed(), std::nullopt, {reduce, expand, 0}, steps);
}

// The columns of the reduced rows that belong to factors.
Tensor columns_of(const Tensor& reduced, const Factors& factors) {
  return reduced.narrow(1, factors.first_column, factors.rank());
}

// The gradient of matrices [L, D, F]; transposed in memory if the matrices are.
Tensor gradient_of_matrices(const Tensor& matrices, const Tensor& lhs, const Tensor& rhs, const Steps& steps) {
  if (is_transposed(matrices)) return steps.multiply_groups(rhs, lhs).transpose(1, 2);
  return steps.multiply_groups(lhs, rhs);
}

// The gradient of biases [L, F]: for each expert, the sum of its rows of grad [R, F], each times its scale [R, 1].
Tensor gradient_of_biases(const Tensor& scale, const Tensor& grad, const Steps& steps) {
  return steps.multiply_groups(scale, grad).squeeze(1);
}

// The gradients of the factors beside matrices, from the rows that they multiplied, the reduced rows, the gradients of
// these, and the gradients of the products.
struct FactorRows {
  Tensor rows;
  Tensor reduced;
  Tensor grad_reduced;
  Tensor grad;
};

void backward_factors(const Factors& factors, bool wants_a, bool wants_b, const FactorRows& rows, const Steps& steps,
                      Tensor& grad_a, Tensor& grad_b) {
  if (wants_a) grad_a = gradient_of_matrices(*factors.a, rows.rows, rows.grad_reduced, steps);
  if (wants_b) grad_b = gradient_of_matrices(*factors.b, rows.reduced, rows.grad, steps);
}

// The gradient of the preactivations, undefined if it is not needed; without `grad`, the gradient of the activations,
// it is not. And the activations, if they are wanted.
struct ActivationBackward {
  Preactivations grad;
  Tensor activated;
};

ActivationBackward backward_activation(const Tensor& grad, const Preactivations& z, bool wants_activated,
                                       const ExpertFfnArguments& a, const Steps& steps) {
  const auto layout = a.gate_layout();
  const auto dtype = a.x.scalar_type();
  const auto [gate, up] = z.parts(layout, steps.elementwise_type);
  if (grad.defined() && !steps.is_differentiable) {
    return {z, activation_gradient_in_place(a.kind(), grad, gate, up, wants_activated)};
  }
  const Tensor activated = wants_activated ? activated_rows(a.kind(), gate, up) : Tensor();
  if (!grad.defined()) return {{}, activated};
  const auto [grad_gate, grad_up] = activation_gradient(a.kind(), grad.to(steps.elementwise_type), gate, up);
  if (layout == GateLayout::separate) return {{grad_gate.to(dtype), grad_up.to(dtype)}, activated};
  return {{Tensor(), preactivations_of(layout, grad_gate, grad_up).to(dtype)}, activated};
}

// For each row, the product of two rows.
Tensor row_products(const Tensor& a, const Tensor& b) {
  return (a * b).sum(1, /*keepdim=*/false, accumulator_type(a.scalar_type()));
}

// Computes the gradients of down, its bias, its factors and the weights; returns the gradient of the preactivations,
// undefined if no wanted gradient needs it.
Preactivations backward_down(const Tensor& grad_out, const Preactivations& z, const Tensor& reduced,
                             const Wanted& wanted, const ExpertFfnArguments& a, const Steps& steps, Gradients& grads) {
  const bool needs_grad = needs_grad_activated(wanted);
  Projected grad_rows;
  Tensor bias_products;
  if (needs_grad || wanted.down_a) {
    const Tensor grad_y = steps.rows_of_tokens(grad_out);
    grad_rows = project_backward(grad_y, a.down_weights(), a.down_factors(), needs_grad, steps);
    if (wanted.weights && a.down_bias.has_value()) {
      bias_products = row_products(grad_y.to(steps.elementwise_type), steps.rows_of_biases(*a.down_bias));
    }
  }
  const bool wants_activated = wanted.weights || wanted.down || wanted.down_a;
  auto [grad_z, activated] = backward_activation(grad_rows.rows, z, wants_activated, a, steps);
  if (wanted.weights) {
    const Tensor products = row_products(activated, grad_rows.rows.to(steps.elementwise_type));
    grads.weights = steps.slots_of_rows(bias_products.defined() ? products + bias_products : products);
  }
  grad_rows.rows.reset();
  if (!wanted.down && !wanted.down_a && !wanted.down_b && !wanted.down_bias) return grad_z;
  if (activated.defined()) activated = activated.to(a.x.scalar_type());
  const bool wants_weighted = wanted.down || wanted.down_b || wanted.down_bias;
  const Tensor weighted_grad = wants_weighted ? steps.weighted_rows_of_tokens(grad_out) : Tensor();
  if (wanted.down) grads.down = gradient_of_matrices(a.down, activated, weighted_grad, steps);
  const Tensor reduced_rows = wanted.down_b ? columns_of(reduced, a.down_factors()) : Tensor();
  const Tensor grad_reduced = wanted.down_a ? steps.times_weights(grad_rows.reduced) : Tensor();
  backward_factors(a.down_factors(), wanted.down_a, wanted.down_b,
                   {activated, reduced_rows, grad_reduced, weighted_grad}, steps, grads.down_a, grads.down_b);
  if (wanted.down_bias) {
    const Tensor ones = at::ones({weighted_grad.size(0), 1}, weighted_grad.options());
    grads.down_bias = gradient_of_biases(ones, weighted_grad, steps);
  }
  return grad_z;
}

// Computes the gradients of x, gate, up, their biases and their factors.
void backward_projections(const Preactivations& grad, const Tensor& reduced, const Wanted& wanted,
                          const ExpertFfnArguments& a, const Steps& steps, Gradients& grads) {
  Tensor grad_reduced_gate;
  Tensor grad_reduced_up;
  // The gradient of the rows, if it is wanted, and of the reduced rows.
  const auto backward_rows = [&](const Weights& matrices, const Factors& factors, const Tensor& of_product,
                                 Tensor& grad_reduced) {
    const auto [of_rows, of_reduced] = project_backward(of_product, matrices, factors, wanted.x, steps);
    grad_reduced = of_reduced;
    return of_rows;
  };
  const auto backward_gate = [&] {
    return backward_rows(a.gate_weights(), a.gate_factors(), grad.gate, grad_reduced_gate);
  };
  const auto backward_up = [&] { return backward_rows(a.up_weights(), a.up_factors(), grad.up, grad_reduced_up); };
  if (wanted.x) {
    grads.x = a.gate.has_value() ? steps.weighted_sum_of_rows({backward_gate, backward_up})
                                 : steps.weighted_sum_of_rows({backward_up});
  } else {
    if (wanted.gate_a) backward_gate();
    if (wanted.up_a) backward_up();
  }
  const bool wants_tokens = wanted.gate || wanted.up || wanted.gate_a || wanted.up_a;
  const Tensor tokens = wants_tokens ? steps.weighted_rows_of_tokens(a.x) : Tensor();
  if (wanted.gate) grads.gate = gradient_of_matrices(*a.gate, tokens, grad.gate, steps);
  if (wanted.up) grads.up = gradient_of_matrices(a.up, tokens, grad.up, steps);
  const auto reduced_rows = [&](bool is_wanted, const Factors& factors) {
    return is_wanted ? steps.times_weights(columns_of(reduced, factors)) : Tensor();
  };
  backward_factors(a.gate_factors(), wanted.gate_a, wanted.gate_b,
                   {tokens, reduced_rows(wanted.gate_b, a.gate_factors()), grad_reduced_gate, grad.gate}, steps,
                   grads.gate_a, grads.gate_b);
  backward_factors(a.up_factors(), wanted.up_a, wanted.up_b,
                   {tokens, reduced_rows(wanted.up_b, a.up_factors()), grad_reduced_up, grad.up}, steps, grads.up_a,
                   grads.up_b);
  if (!wanted.gate_bias && !wanted.up_bias) return;
  const Tensor scale = steps.column_of_weights();
  if (wanted.gate_bias) grads.gate_bias = gradient_of_biases(scale, grad.gate, steps);
  if (wanted.up_bias) grads.up_bias = gradient_of_biases(scale, grad.up, steps);
}

// What the backward pass reads, computed again; the reduced rows of down only if the gradient of their factor needs
// them.
struct Recomputed {
  Preactivations preactivations;
  Tensor reduced;
};

Recomputed recomputed(const ExpertFfnArguments& a, const Wanted& wanted, const Steps& steps) {
  // Where saved ones are, because bits of a product may depend on the address of an operand.
  const auto [z, saved, reduced_gate, reduced_up] = project_tokens(a, steps, !steps.is_differentiable);
  Tensor reduced_down;
  if (wanted.down_b) {
    const auto [gate, up] = z.parts(a.gate_layout(), steps.elementwise_type);
    const Tensor activated = activated_rows(a.kind(), gate, up).to(a.x.scalar_type());
    reduced_down = steps.multiply_rows(activated, {*a.down_a}, std::nullopt);
  }
  return {z, side_by_side(a, {reduced_gate, reduced_up, reduced_down})};
}

}  // namespace

Gradients expert_ffn_backward_aten(const Tensor& grad_out, const std::optional<Intermediates>& kept,
                                   const Wanted& wanted, const ExpertFfnArguments& a, Differentiable differentiable) {
  const Steps steps(a, differentiable);
  const Recomputed rows = kept.has_value() ? Recomputed{Preactivations::in(kept->preactivations, a), kept->reduced}
                                           : recomputed(a, wanted, steps);
  const Tensor none = at::empty({0}, a.x.options());
  std::array<Tensor, Gradients::kSize> empty;
  empty.fill(none);
  Gradients grads = Gradients::from(empty);
  grads.weights = none.to(accumulator_type(a.x.scalar_type()));
  const Preactivations grad_z = backward_down(grad_out, rows.preactivations, rows.reduced, wanted, a, steps, grads);
  if (grad_z.up.defined()) backward_projections(grad_z, rows.reduced, wanted, a, steps, grads);
  return grads;
}

}  // namespace maxmoe::ops
