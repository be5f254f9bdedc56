// expert_ffn and its backward pass on all devices but the CPU: through CUDA kernels where a step has one, otherwise
// through ATen.
//
// The steps read the plan on the device alone, so that the host does not wait for it, and leave the rows past the last
// group undefined, because no result depends on them. The operators of this library would launch more kernels, because
// they check the plan again and write zeros: gmm 7 more, tgmm 2, ragged_sort 4.
//
// Backward, three products take the weight w of a row: the sum of the gradients of a token's rows, and the gradients of
// the matrices. The CUDA kernel of the activation multiplies by w the gradients of the preactivations and the
// activations that it computes, so that the other steps are as without weights. ATen would take a pass over rows of F
// numbers for each: there, rows of D numbers are multiplied by w when they are gathered or added up.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include "ops/activation.h"
#include "ops/backend.h"
#include "ops/expert_ffn/expert_ffn.h"
#include "ops/grouped_mm.h"
#include "ops/row_sums.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// Rows after a projection, and its reduced rows; undefined without factors.
struct Projected {
  Tensor rows;
  Tensor reduced;
};

// The plan, and the steps that read it.
class Steps {
 public:
  // A row without a slot (-1) gets an arbitrary token.
  explicit Steps(const ExpertFfnArguments& a)
      : a_(a),
        weights_(a.weights),
        groups_(a.group_sizes, 0, a.group_sizes.size(0)),
        token_of_row_(a.top_k == 1 ? a.slots.clamp_min(0) : a.slots.div(a.top_k, "trunc")) {}

  // The same steps with the weight 1.
  Steps without_weights() const {
    Steps steps = *this;
    steps.weights_.reset();
    return steps;
  }

  // [R, D]: for each row, the row of x [T, D] of its token; times the weight of its slot.
  Tensor rows_of_tokens(const Tensor& x) const { return selected_rows(x, token_of_row_); }
  Tensor weighted_rows_of_tokens(const Tensor& x) const { return selected_rows(x, token_of_row_, weights_of_rows()); }

  // [T, D]: for each token, the sum of its rows of one or two tensors [R, D], each times the weight of its slot.
  Tensor weighted_sum_of_rows(std::initializer_list<std::function<Tensor()>> tensors) const {
    return sums_of_groups(a_.rows, a_.top_k, weights_, a_.x.scalar_type(), tensors);
  }

  // [R, F]: the rows [R, D] times the matrices [L, D, F] of their experts, plus the biases [L, F].
  Projected project(const Tensor& rows, const Projection& projection) const {
    Tensor product = multiply_rows(rows, projection);
    if (!projection.has_factors()) return {product, {}};
    const Tensor reduced = multiply_rows(rows, {*projection.a});
    return {product.add_(multiply_rows(reduced, {*projection.b})), reduced};
  }
  // The same without factors.
  Tensor multiply_rows(const Tensor& rows, const Projection& matrices) const {
    return ops::multiply_rows(rows, matrices, groups_);
  }

  // [L, D, F]: for each expert, its rows of lhs [R, D], transposed, times its rows of rhs [R, F].
  Tensor multiply_groups(const Tensor& lhs, const Tensor& rhs) const { return ops::multiply_groups(lhs, rhs, groups_); }

  // [R, D]: for each row, the bias [L, D] of its expert.
  Tensor rows_of_biases(const Tensor& biases) const {
    return biases.index_select(0, groups_.of_rows(a_.slots.size(0)));
  }

  // Rows [R, r], each times the weight of its slot.
  Tensor times_weights(const Tensor& rows) const {
    if (!weights_.has_value()) return rows;
    const auto type = accumulator_type(rows.scalar_type());
    return (rows.to(type) * weights_of_rows()->to(type).unsqueeze(1)).to(rows.scalar_type());
  }

  // [R, 1]: for each row, the weight of its slot, in the dtype of x.
  Tensor column_of_weights() const {
    if (!weights_.has_value()) return at::ones({a_.slots.size(0), 1}, a_.x.options());
    return weights_of_rows()->to(a_.x.scalar_type()).unsqueeze(1);
  }

  // [T * K]: for each slot, the value [R] of its row, 0 for a slot without a row.
  Tensor slots_of_rows(const Tensor& values) const {
    return selected_rows_or_zeros(values.unsqueeze(1), a_.rows).squeeze(1);
  }

  // [R]: for each row, the weight of its slot, if there are weights.
  OptionalTensor weights_of_rows() const {
    if (!weights_.has_value()) return std::nullopt;
    return weights_->reshape(-1).index_select(0, a_.slots.clamp_min(0));
  }

 private:
  const ExpertFfnArguments& a_;
  OptionalTensor weights_;
  RowGroups groups_;
  Tensor token_of_row_;  // [R]
};

// The preactivations Z of all rows as the products give them. `up` is [R, F], or [R, 2F] with a fused gate; `gate`
// [R, F] is undefined unless gate is given. Saved for backward of tensors of the CPU, `up` follows `gate` in the memory
// of one tensor [R, 2F].
struct Preactivations {
  Tensor gate;
  Tensor up;

  static Preactivations in(const Tensor& saved, const Tensor& saved_gate, const ExpertFfnArguments& a) {
    if (!a.gate.is_given()) return {Tensor(), saved};
    if (a.has_gate_apart()) return {saved_gate.contiguous(), saved.contiguous()};
    const Tensor both = saved.contiguous().view({2, saved.size(0), a.up_width()});
    return {both.select(0, 0), both.select(0, 1)};
  }
  // The arguments of the activation: gate and up, [R, F] each.
  std::pair<Tensor, Tensor> parts(GateLayout layout) const {
    return layout == GateLayout::separate ? std::pair(gate, up) : gate_and_up(layout, up);
  }
  // activation(Z)
  Tensor activated(const ActivationKind& kind) const {
    const auto [gate_part, up_part] = parts(kind.gate);
    return activate(kind, gate_part, up_part);
  }
};

// The reduced rows of gate, up and down, which may be undefined, side by side in one tensor.
struct Reduced {
  Tensor gate, up, down;

  static Reduced in(const Tensor& columns, const ExpertFfnArguments& a) {
    int64_t begin = 0;
    const auto next = [&](const Projection& projection) {
      const Tensor part = columns.narrow(1, begin, projection.rank());
      begin += projection.rank();
      return part;
    };
    // Braces fix the order of the calls.
    return {next(a.gate), next(a.up), next(a.down)};
  }
  Tensor side_by_side(const ExpertFfnArguments& a) const {
    std::vector<Tensor> given;
    for (const Tensor& rows : {gate, up, down}) {
      if (rows.defined()) given.push_back(rows);
    }
    return given.empty() ? at::empty({a.slots.size(0), 0}, a.x.options()) : at::cat(given, 1);
  }
};

// The intermediates that the backward pass reads. `saved` contains the preactivations, if it is defined.
struct ProjectedTokens {
  Preactivations preactivations;
  Reduced reduced;  // without down
  Tensor saved = {};
};

ProjectedTokens project_tokens(const ExpertFfnArguments& a, const Steps& steps, bool is_saved) {
  const Tensor tokens = steps.rows_of_tokens(a.x);
  if (!a.gate.is_given()) {
    const auto [up, reduced] = steps.project(tokens, a.up);
    return {{Tensor(), up}, {Tensor(), reduced, Tensor()}, up};
  }
  const bool is_copied = is_saved && !a.has_gate_apart();
  const Tensor saved = is_copied ? at::empty({tokens.size(0), a.preactivation_width()}, tokens.options()) : Tensor();
  Preactivations z = is_copied ? Preactivations::in(saved, Tensor(), a) : Preactivations{};
  // The products are computed one after the other, so that only one of them is in memory beside `saved`.
  const auto store = [](Tensor& columns, const Projected& projected) {
    columns = columns.defined() ? columns.copy_(projected.rows) : projected.rows;
    return projected.reduced;
  };
  const Tensor reduced_gate = store(z.gate, steps.project(tokens, a.gate));
  const Tensor reduced_up = store(z.up, steps.project(tokens, a.up));
  return {z, {reduced_gate, reduced_up, Tensor()}, is_copied ? saved : z.up};
}

// The gradient of the rows that `project` multiplied, if it is wanted, and of its reduced rows.
Projected project_backward(const Tensor& grad, const Projection& projection, bool wants_rows, const Steps& steps) {
  const Projection transposed = projection.transposed();
  if (wants_rows) return steps.project(grad, transposed);
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
// gradients of these, and the gradients of the products. Tensors that no wanted gradient needs are undefined.
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

// Computes the gradients of down. The weights are in `rows.grad` or, with `is_folded`, in the activations, `rows.rows`.
void backward_down_matrices(ProjectionRows rows, bool is_folded, const PerTensor<bool>& wanted,
                            const ExpertFfnArguments& a, const Steps& steps, PerTensor<Tensor>& grads) {
  if (is_folded && wanted.b) rows.reduced = steps.times_weights(rows.reduced);
  if (!is_folded && wanted.a) rows.grad_reduced = steps.times_weights(rows.grad_reduced);
  backward_matrices(a.down, wanted, rows, steps, grads);
  if (!wanted.bias) return;
  const Tensor scale = is_folded ? steps.column_of_weights() : at::ones({rows.grad.size(0), 1}, rows.grad.options());
  grads.bias = gradient_of_biases(scale, rows.grad, steps);
}

// Computes the gradients of down and the weights. The preactivations become their gradient if a wanted gradient needs
// it. Returns whether that contains the weights.
bool backward_down(const Tensor& grad_out, const Preactivations& z, const Reduced& reduced, const Wanted& wanted,
                   const ExpertFfnArguments& a, const Steps& steps, Gradients& grads) {
  const bool needs_grad = needs_grad_activated(wanted);
  const bool folds_weights = needs_grad && path_of(a.x, "activate_rows_backward") == Path::cuda_kernels;
  const PerTensor<bool>& down = wanted.down;
  Tensor grad_y;
  Projected grad_rows;
  Tensor bias_products;
  if (needs_grad || down.a) {
    grad_y = steps.rows_of_tokens(grad_out);
    grad_rows = project_backward(grad_y, a.down, needs_grad, steps);
    if (wanted.weights && a.down.bias.has_value()) {
      bias_products = row_products(grad_y, steps.rows_of_biases(*a.down.bias));
    }
    if (!folds_weights) grad_y.reset();
  }
  const bool wants_activated = down.weights || down.a;
  Tensor activated;
  if (grad_rows.rows.defined()) {
    const auto [gate, up] = z.parts(a.gate_layout());
    const OptionalTensor weights = folds_weights ? steps.weights_of_rows() : std::nullopt;
    const ActivationResults results =
        activation_gradient(a.kind(), grad_rows.rows, gate, up, weights, wants_activated, wanted.weights);
    activated = results.activated;
    if (wanted.weights) {
      grads.weights =
          steps.slots_of_rows(bias_products.defined() ? results.products + bias_products : results.products);
    }
  } else if (wants_activated) {
    activated = z.activated(a.kind());
  }
  grad_rows.rows.reset();
  Tensor grad;
  if (down.weights || down.b || down.bias) grad = folds_weights ? grad_y : steps.weighted_rows_of_tokens(grad_out);
  backward_down_matrices({activated, reduced.down, grad_rows.reduced, grad}, folds_weights, down, a, steps, grads.down);
  return folds_weights;
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

}  // namespace

Outputs expert_ffn_aten(const ExpertFfnArguments& a, bool keeps_intermediates) {
  const Steps steps(a);
  ProjectedTokens tokens = project_tokens(a, steps, keeps_intermediates);
  const Tensor activated = tokens.preactivations.activated(a.kind());
  const Tensor out = steps.weighted_sum_of_rows({[&] {
    const auto [rows, reduced] = steps.project(activated, a.down);
    tokens.reduced.down = reduced;
    return rows;
  }});
  const auto empty = [&](int64_t rows, int64_t width) { return at::empty({rows, width}, a.x.options()); };
  if (!keeps_intermediates) {
    return {out, empty(0, a.preactivation_width()), empty(0, a.reduced_width()), empty(0, a.gate_width())};
  }
  const Tensor gate = a.has_gate_apart() ? tokens.preactivations.gate : empty(a.slots.size(0), 0);
  return {out, tokens.saved, tokens.reduced.side_by_side(a), gate};
}

Gradients expert_ffn_backward_aten(const Tensor& grad_out, const std::optional<Intermediates>& kept,
                                   const Wanted& wanted, const ExpertFfnArguments& a) {
  const Steps steps(a);
  // Recomputed preactivations have the same place in memory as saved ones, because bits of a product may depend on the
  // address of an operand.
  ProjectedTokens tokens = kept.has_value() ? ProjectedTokens{Preactivations::in(kept->preactivations, kept->gate, a),
                                                              Reduced::in(kept->reduced, a)}
                                            : project_tokens(a, steps, /*is_saved=*/true);
  const Preactivations& z = tokens.preactivations;
  if (!kept.has_value() && wanted.down.b) {
    tokens.reduced.down = steps.multiply_rows(z.activated(a.kind()), {*a.down.a});
  }
  const Tensor none = at::empty({0}, a.x.options());
  std::array<Tensor, Gradients::kSize> empty;
  empty.fill(none);
  Gradients grads = Gradients::from(empty);
  grads.weights = none.to(accumulator_type(a.x.scalar_type()));
  const bool has_weights = backward_down(grad_out, z, tokens.reduced, wanted, a, steps, grads);
  if (!needs_grad_activated(wanted)) return grads;
  backward_projections(z, tokens.reduced, wanted, a, has_weights ? steps.without_weights() : steps, grads);
  return grads;
}

}  // namespace maxmoe::ops
