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
  Tensor multiply_rows(const Tensor& rows, const Tensor& matrices, const OptionalTensor& biases) const {
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

// The preactivations Z of all rows: [R, 2F], gate and up in the layout of the gate; [R, F] without a gate.
Tensor preactivations_of_rows(const ExpertFfnArguments& a, const Steps& steps) {
  const Tensor tokens = steps.rows_of_tokens(a.x);
  const auto gate = [&] { return steps.multiply_rows(tokens, *a.gate, a.gate_bias); };
  const auto up = [&] { return steps.multiply_rows(tokens, a.up, a.up_bias); };
  if (!a.gate.has_value()) return up();
  if (steps.is_differentiable) return at::cat({gate(), up()}, 1);
  // The products are computed one after the other, so that only one of them is in memory beside z.
  const Tensor z = at::empty({tokens.size(0), a.preactivation_width()}, a.x.options());
  const auto [gate_columns, up_columns] = gate_and_up(GateLayout::concatenated, z);
  gate_columns.copy_(gate());
  up_columns.copy_(up());
  return z;
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

// Computes the gradients of down, its bias and the weights; returns the gradient of the preactivations `z`, or an
// undefined tensor if no wanted gradient needs it.
Tensor backward_down(const Tensor& grad_out, const Tensor& z, const Wanted& wanted, const ExpertFfnArguments& a,
                     const Steps& steps, Gradients& grads) {
  const auto type = steps.elementwise_type;
  const auto dtype = a.x.scalar_type();
  const auto [gate, up] = gate_and_up(a.gate_layout(), z.to(type));
  const Tensor grad_y = steps.rows_of_tokens(grad_out);
  const Tensor scale = steps.rows_of_weights();
  Tensor grad_activated;
  if (needs_grad_activated(wanted)) {
    grad_activated = steps.multiply_rows(grad_y, a.down.transpose(1, 2), std::nullopt).to(type);
  }
  if (wanted.weights || wanted.down) {
    const Tensor activated = activated_rows(a.kind(), gate, up);
    if (wanted.weights) {
      const auto sum_type = accumulator_type(dtype);
      Tensor of_rows = (activated * grad_activated).sum(1, false, sum_type);
      if (a.down_bias.has_value()) {
        of_rows = of_rows + (grad_y.to(type) * steps.rows_of_biases(*a.down_bias)).sum(1, false, sum_type);
      }
      grads.weights = steps.slots_of_rows(of_rows);
    }
    if (wanted.down) grads.down = gradient_of_matrices(a.down, (activated * scale).to(dtype), grad_y, steps);
  }
  if (wanted.down_bias) grads.down_bias = gradient_of_biases(scale.to(dtype), grad_y, steps);
  if (!grad_activated.defined()) return {};
  if (a.weights.has_value()) grad_activated = grad_activated * scale;
  const auto [grad_gate, grad_up] = activation_gradient(a.kind(), std::move(grad_activated), gate, up);
  if (steps.is_differentiable) return preactivations_of(a.gate_layout(), grad_gate, grad_up).to(dtype);
  // Overwrites z, which is not read again.
  up.copy_(grad_up);
  if (gate.defined()) gate.copy_(grad_gate);
  return z;
}

Tensor gradient_of_x(const Tensor& grad_gate, const Tensor& grad_up, const ExpertFfnArguments& a, const Steps& steps) {
  const Tensor grad_rows = steps.multiply_rows(grad_up, a.up.transpose(1, 2), std::nullopt);
  if (a.gate.has_value()) {
    grad_rows.add_(steps.multiply_rows(grad_gate, a.gate->transpose(1, 2), std::nullopt));
  }
  return steps.sum_of_rows(grad_rows, std::nullopt);
}

// Computes the gradients of x, gate, up and their biases.
void backward_up(const Tensor& grad_z, const Wanted& wanted, const ExpertFfnArguments& a, const Steps& steps,
                 Gradients& grads) {
  const int64_t gate_width = a.gate.has_value() ? a.gate->size(2) : 0;
  const Tensor grad_gate = grad_z.narrow(1, 0, gate_width);
  const Tensor grad_up = grad_z.narrow(1, gate_width, a.up.size(2));
  if (wanted.x) grads.x = gradient_of_x(grad_gate, grad_up, a, steps);
  if (wanted.gate || wanted.up) {
    const Tensor tokens = steps.rows_of_tokens(a.x);
    if (wanted.gate) grads.gate = gradient_of_matrices(*a.gate, tokens, grad_gate, steps);
    if (wanted.up) grads.up = gradient_of_matrices(a.up, tokens, grad_up, steps);
  }
  const Tensor ones = at::ones({grad_z.size(0), 1}, a.x.options());
  if (wanted.gate_bias) grads.gate_bias = gradient_of_biases(ones, grad_gate, steps);
  if (wanted.up_bias) grads.up_bias = gradient_of_biases(ones, grad_up, steps);
}

}  // namespace

Outputs expert_ffn_aten(const ExpertFfnArguments& a, Differentiable differentiable) {
  const Steps steps(a, differentiable);
  const Tensor z = preactivations_of_rows(a, steps);
  const auto [gate, up] = gate_and_up(a.gate_layout(), z.to(steps.elementwise_type));
  const Tensor row_outputs =
      steps.multiply_rows(activated_rows(a.kind(), gate, up).to(a.x.scalar_type()), a.down, a.down_bias);
  return {steps.sum_of_rows(row_outputs, a.weights), z};
}

Gradients expert_ffn_backward_aten(const Tensor& grad_out, const OptionalTensor& preactivations, const Wanted& wanted,
                                   const ExpertFfnArguments& a, Differentiable differentiable) {
  const Steps steps(a, differentiable);
  const Tensor z = preactivations.has_value() ? *preactivations : preactivations_of_rows(a, steps);
  const Tensor none = at::empty({0}, a.x.options());
  Gradients grads{none, none.to(accumulator_type(a.x.scalar_type())), none, none, none, none, none, none};
  const Tensor grad_z = backward_down(grad_out, z, wanted, a, steps, grads);
  if (grad_z.defined()) backward_up(grad_z, wanted, a, steps, grads);
  return grads;
}

}  // namespace maxmoe::ops
