// expert_ffn through ATen, in two variants with the same steps. One is for devices without kernels: only the device
// reads the plan, so that the host does not wait for the device. The other is differentiable on every device, for
// second derivatives and forward-mode AD.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "ops/expert_ffn.h"
#include "ops/grouped_mm.h"
#include "ops/operators.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// The plan, and the steps that read it. Differentiable steps call operators of this library, which write zeros to the
// rows past the last group. The other steps call ATen directly and leave these rows undefined, because no result
// depends on them. On a device, the operators would launch more kernels, because they read the plan again and write the
// zeros: gmm 7 more, tgmm 2, ragged_sort 4.
class Steps {
 public:
  Steps(const ExpertFfnArguments& a, Differentiable differentiable)
      : is_differentiable(differentiable == Differentiable::yes),
        // Wider than 16 bits, because rounding after every elementwise operation makes second derivatives inaccurate.
        elementwise_type(is_differentiable ? accumulator_type(a.x.scalar_type()) : a.x.scalar_type()),
        a_(a),
        groups_(row_groups(a.group_sizes, 0, a.group_sizes.size(0))),
        slot_of_row_(a.slots.clamp_min(0)),
        token_of_row_(is_differentiable ? Tensor() : slot_of_row_.div(a.top_k, "floor")),
        row_of_slot_(a.rows.masked_fill(a.rows.ge(groups_.bounds.select(0, groups_.size())), -1)) {}

  // [R, D]: for each row, the row of x [T, D] of its token.
  Tensor rows_of_tokens(const Tensor& x) const {
    if (is_differentiable) return ragged_sort(x, a_.slots, a_.rows, a_.top_k, std::nullopt);
    return x.index_select(0, token_of_row_);
  }

  // [T, D]: for each token, the sum of its rows [R, D], each times the weight of its slot.
  Tensor sum_of_rows(const Tensor& rows, const OptionalTensor& weights) const {
    return ragged_gather_reduce(rows, row_of_slot_, a_.top_k, weights, std::nullopt);
  }

  // [R, F]: the rows [R, D] times the matrices [L, D, F] of their experts, plus the biases [L, F].
  Tensor multiply_rows(const Tensor& rows, const Weights& matrices, const OptionalTensor& biases) const {
    if (is_differentiable) return gmm(rows, matrices, a_.group_sizes, biases, 0);
    return ops::multiply_rows(rows, matrices, groups_, biases);
  }

  // [L, D, F]: for each expert, its rows of lhs [R, D], transposed, times its rows of rhs [R, F].
  Tensor multiply_groups(const Tensor& lhs, const Tensor& rhs) const {
    if (is_differentiable) return tgmm(lhs, rhs, a_.group_sizes, groups_.size(), 0);
    return ops::multiply_groups(lhs, rhs, groups_);
  }

  // [R, D]: for each row, the bias [L, D] of its expert.
  Tensor rows_of_biases(const Tensor& biases) const {
    return biases.index_select(0, groups_.of_rows(a_.slots.size(0)));
  }

  // [R, 1]: for each row, the weight of its slot.
  Tensor rows_of_weights() const {
    const auto options = a_.x.options().dtype(elementwise_type);
    if (!a_.weights.has_value()) return at::ones({slot_of_row_.size(0), 1}, options);
    return a_.weights->reshape(-1).index_select(0, slot_of_row_).to(elementwise_type).unsqueeze(1);
  }

  // [T * K]: for each slot, the value [R] of its row, 0 for a slot without a row.
  Tensor slots_of_rows(const Tensor& values) const {
    if (values.numel() == 0) return at::zeros({row_of_slot_.numel()}, values.options());
    return values.index_select(0, row_of_slot_.clamp_min(0)).masked_fill(row_of_slot_.lt(0), 0);
  }

  const bool is_differentiable;
  const at::ScalarType elementwise_type;

 private:
  const ExpertFfnArguments& a_;
  const RowGroups groups_;
  const Tensor slot_of_row_;   // [R]
  const Tensor token_of_row_;  // [R], undefined for differentiable steps
  const Tensor row_of_slot_;   // [T * K], -1 for a slot without a row
};

// Rows times the matrices of their experts, and the reduced rows of the factors beside them; undefined without factors.
struct Projected {
  Tensor rows;
  Tensor reduced;
};

Projected project(const Tensor& rows, const Weights& matrices, const OptionalTensor& biases, const Factors& factors,
                  const Steps& steps) {
  const Tensor product = steps.multiply_rows(rows, matrices, biases);
  if (!factors.are_given()) return {product, {}};
  const Tensor reduced = steps.multiply_rows(rows, {*factors.a}, std::nullopt);
  return {product + steps.multiply_rows(reduced, {*factors.b}, std::nullopt), reduced};
}

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

// The preactivations Z of all rows: [R, 2F], gate and up in the layout of the gate; [R, F] without a gate. And the
// reduced rows of gate and up.
struct ProjectedTokens {
  Tensor preactivations;
  Tensor reduced_gate;
  Tensor reduced_up;
};

ProjectedTokens project_tokens(const ExpertFfnArguments& a, const Steps& steps) {
  const Tensor tokens = steps.rows_of_tokens(a.x);
  const auto project_up = [&] { return project(tokens, a.up_weights(), a.up_bias, a.up_factors(), steps); };
  if (!a.gate.has_value()) {
    const auto [up, reduced] = project_up();
    return {up, {}, reduced};
  }
  const auto project_gate = [&] { return project(tokens, a.gate_weights(), a.gate_bias, a.gate_factors(), steps); };
  if (steps.is_differentiable) {
    const auto [gate, reduced_gate] = project_gate();
    const auto [up, reduced_up] = project_up();
    return {at::cat({gate, up}, 1), reduced_gate, reduced_up};
  }
  // The products are computed one after the other, so that only one of them is in memory beside z.
  const Tensor z = at::empty({tokens.size(0), a.preactivation_width()}, a.x.options());
  const auto [gate_columns, up_columns] = gate_and_up(GateLayout::concatenated, z);
  const auto store = [](const Tensor& columns, const Projected& projected) {
    columns.copy_(projected.rows);
    return projected.reduced;
  };
  const Tensor reduced_gate = store(gate_columns, project_gate());
  return {z, reduced_gate, store(up_columns, project_up())};
}

// The reduced rows that are given side by side.
Tensor side_by_side(const ExpertFfnArguments& a, std::initializer_list<Tensor> reduced) {
  std::vector<Tensor> given;
  std::copy_if(reduced.begin(), reduced.end(), std::back_inserter(given), [](const Tensor& t) { return t.defined(); });
  return given.empty() ? at::empty({a.slots.size(0), 0}, a.x.options()) : at::cat(given, 1);
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

// Computes the gradients of down, its bias, its factors and the weights; returns the gradient of the preactivations, or
// an undefined tensor if no wanted gradient needs it.
Tensor backward_down(const Tensor& grad_out, const Intermediates& kept, const Wanted& wanted,
                     const ExpertFfnArguments& a, const Steps& steps, Gradients& grads) {
  const auto type = steps.elementwise_type;
  const auto dtype = a.x.scalar_type();
  const auto [gate, up] = gate_and_up(a.gate_layout(), kept.preactivations.to(type));
  const Tensor grad_y = steps.rows_of_tokens(grad_out);
  const Tensor scale = steps.rows_of_weights();
  Projected grad_rows;
  if (needs_grad_activated(wanted) || wanted.down_a) {
    grad_rows = project_backward(grad_y, a.down_weights(), a.down_factors(), needs_grad_activated(wanted), steps);
  }
  const Tensor activated =
      wanted.weights || wanted.down || wanted.down_a ? activated_rows(a.kind(), gate, up) : Tensor();
  if (wanted.weights) {
    const auto sum_type = accumulator_type(dtype);
    Tensor of_rows = (activated * grad_rows.rows.to(type)).sum(1, false, sum_type);
    if (a.down_bias.has_value()) {
      of_rows = of_rows + (grad_y.to(type) * steps.rows_of_biases(*a.down_bias)).sum(1, false, sum_type);
    }
    grads.weights = steps.slots_of_rows(of_rows);
  }
  const Tensor weighted = wanted.down || wanted.down_a ? (activated * scale).to(dtype) : Tensor();
  if (wanted.down) grads.down = gradient_of_matrices(a.down, weighted, grad_y, steps);
  const Tensor reduced = wanted.down_b ? (columns_of(kept.reduced, a.down_factors()) * scale).to(dtype) : Tensor();
  backward_factors(a.down_factors(), wanted.down_a, wanted.down_b, {weighted, reduced, grad_rows.reduced, grad_y},
                   steps, grads.down_a, grads.down_b);
  if (wanted.down_bias) grads.down_bias = gradient_of_biases(scale.to(dtype), grad_y, steps);
  if (!needs_grad_activated(wanted)) return {};
  Tensor grad_activated = grad_rows.rows.to(type);
  if (a.weights.has_value()) grad_activated = grad_activated * scale;
  const auto [grad_gate, grad_up] = activation_gradient(a.kind(), std::move(grad_activated), gate, up);
  if (steps.is_differentiable) return preactivations_of(a.gate_layout(), grad_gate, grad_up).to(dtype);
  // Overwrites the preactivations, which are not read again.
  up.copy_(grad_up);
  if (gate.defined()) gate.copy_(grad_gate);
  return kept.preactivations;
}

// Computes the gradients of x, gate, up, their biases and their factors.
void backward_up(const Tensor& grad_z, const Tensor& reduced, const Wanted& wanted, const ExpertFfnArguments& a,
                 const Steps& steps, Gradients& grads) {
  const int64_t gate_width = a.gate.has_value() ? a.up_width() : 0;
  const Tensor grad_gate = grad_z.narrow(1, 0, gate_width);
  const Tensor grad_up = grad_z.narrow(1, gate_width, a.up_width());
  const bool wants_tokens = wanted.gate || wanted.up || wanted.gate_a || wanted.up_a;
  const Tensor tokens = wants_tokens ? steps.rows_of_tokens(a.x) : Tensor();
  // The gradient of the rows of a matrix and of its factors.
  const auto backward_matrices = [&](const Weights& matrices, const Factors& factors, const Tensor& grad, bool wants_a,
                                     bool wants_b, Tensor& grad_a, Tensor& grad_b) {
    Projected grad_rows;
    if (wanted.x || wants_a) grad_rows = project_backward(grad, matrices, factors, wanted.x, steps);
    const Tensor reduced_rows = wants_b ? columns_of(reduced, factors) : Tensor();
    backward_factors(factors, wants_a, wants_b, {tokens, reduced_rows, grad_rows.reduced, grad}, steps, grad_a, grad_b);
    return grad_rows.rows;
  };
  Tensor grad_rows =
      backward_matrices(a.up_weights(), a.up_factors(), grad_up, wanted.up_a, wanted.up_b, grads.up_a, grads.up_b);
  if (a.gate.has_value()) {
    const Tensor of_gate = backward_matrices(a.gate_weights(), a.gate_factors(), grad_gate, wanted.gate_a,
                                             wanted.gate_b, grads.gate_a, grads.gate_b);
    if (wanted.x) grad_rows.add_(of_gate);
  }
  if (wanted.x) grads.x = steps.sum_of_rows(grad_rows, std::nullopt);
  if (wanted.gate) grads.gate = gradient_of_matrices(*a.gate, tokens, grad_gate, steps);
  if (wanted.up) grads.up = gradient_of_matrices(a.up, tokens, grad_up, steps);
  const Tensor ones = at::ones({grad_z.size(0), 1}, a.x.options());
  if (wanted.gate_bias) grads.gate_bias = gradient_of_biases(ones, grad_gate, steps);
  if (wanted.up_bias) grads.up_bias = gradient_of_biases(ones, grad_up, steps);
}

}  // namespace

Outputs expert_ffn_aten(const ExpertFfnArguments& a, Differentiable differentiable) {
  const Steps steps(a, differentiable);
  const auto [z, reduced_gate, reduced_up] = project_tokens(a, steps);
  const auto [gate, up] = gate_and_up(a.gate_layout(), z.to(steps.elementwise_type));
  const Tensor activated = activated_rows(a.kind(), gate, up).to(a.x.scalar_type());
  const auto [rows, reduced_down] = project(activated, a.down_weights(), a.down_bias, a.down_factors(), steps);
  return {steps.sum_of_rows(rows, a.weights), z, side_by_side(a, {reduced_gate, reduced_up, reduced_down})};
}

// The preactivations and the reduced rows; those of down are computed only if the gradient of their factor needs them.
Intermediates intermediates(const ExpertFfnArguments& a, const Wanted& wanted, const Steps& steps) {
  const auto [z, reduced_gate, reduced_up] = project_tokens(a, steps);
  Tensor reduced_down;
  if (wanted.down_b) {
    const auto [gate, up] = gate_and_up(a.gate_layout(), z.to(steps.elementwise_type));
    const Tensor activated = activated_rows(a.kind(), gate, up).to(a.x.scalar_type());
    reduced_down = steps.multiply_rows(activated, {*a.down_a}, std::nullopt);
  }
  return {z, side_by_side(a, {reduced_gate, reduced_up, reduced_down})};
}

Gradients expert_ffn_backward_aten(const Tensor& grad_out, const std::optional<Intermediates>& kept,
                                   const Wanted& wanted, const ExpertFfnArguments& a, Differentiable differentiable) {
  const Steps steps(a, differentiable);
  const Intermediates rows = kept.has_value() ? *kept : intermediates(a, wanted, steps);
  const Tensor none = at::empty({0}, a.x.options());
  Gradients grads;
  std::array<Tensor, Gradients::kSize> empty;
  empty.fill(none);
  grads = Gradients::from(empty);
  grads.weights = none.to(accumulator_type(a.x.scalar_type()));
  const Tensor grad_z = backward_down(grad_out, rows, wanted, a, steps, grads);
  if (grad_z.defined()) backward_up(grad_z, rows.reduced, wanted, a, steps, grads);
  return grads;
}

}  // namespace maxmoe::ops
