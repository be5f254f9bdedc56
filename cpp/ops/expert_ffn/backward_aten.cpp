// The backward pass of expert_ffn through ATen.
//
// Three products take the weight w of a row: the sum of the gradients of a token's rows, and the gradients of the
// matrices. Their rows of D numbers are multiplied by w when they are gathered or added up, which takes no pass of its
// own. So the gradients of activations and preactivations, rows of F numbers, are those without w.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include "ops/expert_ffn/steps.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// The gradient of the rows that `project` multiplied, if it is wanted, and of its reduced rows.
Projected project_backward(const Tensor& grad, const Projection& projection, bool wants_rows, const Steps& steps) {
  const Projection transposed = projection.transposed();
  if (wants_rows) return project(grad, transposed, steps);
  return {Tensor(), steps.multiply_rows(grad, {*transposed.a})};
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

// The gradients of the matrices and factors of a projection, from the rows that it multiplied, the reduced rows, the
// gradients of these, and the gradients of the products. Only what a wanted gradient needs is defined.
struct ProjectionRows {
  Tensor rows;
  Tensor reduced;
  Tensor grad_reduced;
  Tensor grad;
};

void backward_matrices(const Projection& projection, const PerTensor<bool>& wanted, const ProjectionRows& rows,
                       const Steps& steps, PerTensor<Tensor>& grads) {
  if (wanted.weights) grads.weights = gradient_of_matrices(*projection.tensor, rows.rows, rows.grad, steps);
  if (wanted.a) grads.a = gradient_of_matrices(*projection.a, rows.rows, rows.grad_reduced, steps);
  if (wanted.b) grads.b = gradient_of_matrices(*projection.b, rows.reduced, rows.grad, steps);
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

// Computes the gradients of down and the weights; returns the gradient of the preactivations, undefined if no wanted
// gradient needs it.
Preactivations backward_down(const Tensor& grad_out, const Preactivations& z, const Reduced& reduced,
                             const Wanted& wanted, const ExpertFfnArguments& a, const Steps& steps, Gradients& grads) {
  const bool needs_grad = needs_grad_activated(wanted);
  const PerTensor<bool>& down = wanted.down;
  Projected grad_rows;
  Tensor bias_products;
  if (needs_grad || down.a) {
    const Tensor grad_y = steps.rows_of_tokens(grad_out);
    grad_rows = project_backward(grad_y, a.down, needs_grad, steps);
    if (wanted.weights && a.down.bias.has_value()) {
      bias_products = row_products(grad_y.to(steps.elementwise_type), steps.rows_of_biases(*a.down.bias));
    }
  }
  const bool wants_activated = wanted.weights || down.weights || down.a;
  auto [grad_z, activated] = backward_activation(grad_rows.rows, z, wants_activated, a, steps);
  if (wanted.weights) {
    const Tensor products = row_products(activated, grad_rows.rows.to(steps.elementwise_type));
    grads.weights = steps.slots_of_rows(bias_products.defined() ? products + bias_products : products);
  }
  grad_rows.rows.reset();
  if (!down.weights && !down.a && !down.b && !down.bias) return grad_z;
  if (activated.defined()) activated = activated.to(a.x.scalar_type());
  const bool wants_weighted = down.weights || down.b || down.bias;
  const Tensor weighted_grad = wants_weighted ? steps.weighted_rows_of_tokens(grad_out) : Tensor();
  const Tensor grad_reduced = down.a ? steps.times_weights(grad_rows.reduced) : Tensor();
  backward_matrices(a.down, down, {activated, reduced.down, grad_reduced, weighted_grad}, steps, grads.down);
  if (down.bias) {
    const Tensor ones = at::ones({weighted_grad.size(0), 1}, weighted_grad.options());
    grads.down.bias = gradient_of_biases(ones, weighted_grad, steps);
  }
  return grad_z;
}

// Computes the gradients of x, gate and up.
void backward_projections(const Preactivations& grad, const Reduced& reduced, const Wanted& wanted,
                          const ExpertFfnArguments& a, const Steps& steps, Gradients& grads) {
  Reduced grad_reduced;
  // The gradient of the rows, if it is wanted, and of the reduced rows.
  const auto backward_rows = [&](const Projection& projection, const Tensor& of_product, Tensor& of_reduced) {
    const Projected of_rows = project_backward(of_product, projection, wanted.x, steps);
    of_reduced = of_rows.reduced;
    return of_rows.rows;
  };
  const auto backward_gate = [&] { return backward_rows(a.gate, grad.gate, grad_reduced.gate); };
  const auto backward_up = [&] { return backward_rows(a.up, grad.up, grad_reduced.up); };
  if (wanted.x) {
    grads.x = a.gate.is_given() ? steps.weighted_sum_of_rows({backward_gate, backward_up})
                                : steps.weighted_sum_of_rows({backward_up});
  } else {
    if (wanted.gate.a) backward_gate();
    if (wanted.up.a) backward_up();
  }
  const bool wants_tokens = wanted.gate.weights || wanted.up.weights || wanted.gate.a || wanted.up.a;
  const Tensor tokens = wants_tokens ? steps.weighted_rows_of_tokens(a.x) : Tensor();
  const auto weighted = [&](bool is_wanted, const Tensor& of_factors) {
    return is_wanted ? steps.times_weights(of_factors) : Tensor();
  };
  backward_matrices(a.gate, wanted.gate, {tokens, weighted(wanted.gate.b, reduced.gate), grad_reduced.gate, grad.gate},
                    steps, grads.gate);
  backward_matrices(a.up, wanted.up, {tokens, weighted(wanted.up.b, reduced.up), grad_reduced.up, grad.up}, steps,
                    grads.up);
  if (!wanted.gate.bias && !wanted.up.bias) return;
  const Tensor scale = steps.column_of_weights();
  if (wanted.gate.bias) grads.gate.bias = gradient_of_biases(scale, grad.gate, steps);
  if (wanted.up.bias) grads.up.bias = gradient_of_biases(scale, grad.up, steps);
}

// What the backward pass reads, computed again; the reduced rows of down only if the gradient of their factor needs
// them.
struct Recomputed {
  Preactivations preactivations;
  Reduced reduced;
};

Recomputed recomputed(const ExpertFfnArguments& a, const Wanted& wanted, const Steps& steps) {
  // Where saved ones are, because bits of a product may depend on the address of an operand.
  const auto [z, saved, reduced_gate, reduced_up] = project_tokens(a, steps, !steps.is_differentiable);
  Tensor reduced_down;
  if (wanted.down.b) {
    const auto [gate, up] = z.parts(a.gate_layout(), steps.elementwise_type);
    const Tensor activated = activated_rows(a.kind(), gate, up).to(a.x.scalar_type());
    reduced_down = steps.multiply_rows(activated, {*a.down.a});
  }
  return {z, {reduced_gate, reduced_up, reduced_down}};
}

}  // namespace

Gradients expert_ffn_backward_aten(const Tensor& grad_out, const std::optional<Intermediates>& kept,
                                   const Wanted& wanted, const ExpertFfnArguments& a, Differentiable differentiable) {
  const Steps steps(a, differentiable);
  const Recomputed rows = kept.has_value()
                              ? Recomputed{Preactivations::in(kept->preactivations, a), Reduced::in(kept->reduced, a)}
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
