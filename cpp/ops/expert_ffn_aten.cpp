// expert_ffn through ATen, for devices without kernels of their own. Nothing here waits for the device: what the plan
// holds is read by the device alone.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "ops/expert_ffn.h"
#include "ops/grouped_mm.h"
#include "ops/ragged_gather_reduce.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// The plan as the steps below use it. The rows past the last group are computed with, but reach no result.
struct RoutedTensors {
  RowGroups groups;
  Tensor token_of_row;  // [R]
  Tensor slot_of_row;   // [R]
  Tensor row_of_slot;   // [T * K], -1 for a slot without a row
};

RoutedTensors routed_tensors(const ExpertFfnArguments& a) {
  const RowGroups groups = row_groups(a.group_sizes, 0, a.group_sizes.size(0));
  const Tensor slot = a.slots.clamp_min(0);
  const Tensor is_past = a.rows.ge(groups.bounds.select(0, groups.size()));
  return {groups, slot.div(a.top_k, "floor"), slot, a.rows.masked_fill(is_past, -1)};
}

// [T, D]: for each token the sum of its rows, times the weights of their slots.
Tensor sum_of_rows(const Tensor& rows, const RoutedTensors& routed, int64_t top_k, const OptionalTensor& weights) {
  return ragged_gather_reduce(rows, routed.row_of_slot, top_k, weights, std::nullopt);
}

// [R, 2F], in the layout of the gate.
Tensor preactivations_aten(const ExpertFfnArguments& a, const RoutedTensors& routed) {
  const Tensor tokens = a.x.index_select(0, routed.token_of_row);
  if (!a.gate.has_value()) return multiply_rows(tokens, a.up, routed.groups, a.up_bias);
  const Tensor z = at::empty({tokens.size(0), a.preactivation_width()}, a.x.options());
  const auto [gate, up] = gate_and_up(GateLayout::concatenated, z);
  gate.copy_(multiply_rows(tokens, *a.gate, routed.groups, a.gate_bias));
  up.copy_(multiply_rows(tokens, a.up, routed.groups, a.up_bias));
  return z;
}

// [R, 1], of the slots' weights, in the dtype of x.
Tensor scale_of_rows(const ExpertFfnArguments& a, const RoutedTensors& routed) {
  if (!a.weights.has_value()) return at::ones({routed.slot_of_row.size(0), 1}, a.x.options());
  return a.weights->reshape(-1).index_select(0, routed.slot_of_row).to(a.x.scalar_type()).unsqueeze(1);
}

// [T * K]: <dA', A>, plus <dY, bias> of down, of the row of each slot.
Tensor gradient_of_weights(const ExpertFfnArguments& a, const RoutedTensors& routed, const Tensor& activated,
                           const Tensor& grad_activated, const Tensor& grad_y) {
  const auto type = accumulator_type(a.x.scalar_type());
  if (a.slots.numel() == 0) return at::zeros({a.rows.numel()}, a.x.options().dtype(type));
  Tensor of_rows = (activated * grad_activated).sum(1, false, type);
  if (a.down_bias.has_value()) {
    const Tensor bias = a.down_bias->index_select(0, routed.groups.of_rows(a.slots.size(0)));
    of_rows.add_((grad_y * bias).sum(1, false, type));
  }
  return of_rows.index_select(0, routed.row_of_slot.clamp_min(0)).masked_fill_(routed.row_of_slot.lt(0), 0);
}

// Of matrices, in their layout in memory.
Tensor gradient_of_matrices(const Tensor& matrices, const Tensor& lhs, const Tensor& rhs, const RowGroups& groups) {
  if (is_transposed(matrices)) return multiply_groups(rhs, lhs, groups).transpose(1, 2);
  return multiply_groups(lhs, rhs, groups);
}

// The sums of the groups' rows, each times its scale [R, 1].
Tensor gradient_of_bias(const Tensor& scale, const Tensor& grad, const RowGroups& groups) {
  return multiply_groups(scale, grad, groups).squeeze(1);
}

// Of down, its bias and the weights. Overwrites the preactivations with their gradient.
void backward_down(const Tensor& grad_out, const Tensor& z, const Wanted& wanted, const ExpertFfnArguments& a,
                   const RoutedTensors& routed, Gradients& grads) {
  const auto [gate, up] = gate_and_up(a.gate_layout(), z);
  const Tensor grad_y = grad_out.index_select(0, routed.token_of_row);
  const Tensor scale = scale_of_rows(a, routed);
  const Tensor grad_activated = multiply_rows(grad_y, a.down.transpose(1, 2), routed.groups, std::nullopt);
  if (wanted.weights || wanted.down) {
    const Tensor activated = activated_rows(a.kind(), gate, up);
    if (wanted.weights) grads.weights = gradient_of_weights(a, routed, activated, grad_activated, grad_y);
    if (a.weights.has_value()) activated.mul_(scale);
    if (wanted.down) grads.down = gradient_of_matrices(a.down, activated, grad_y, routed.groups);
  }
  if (wanted.down_bias) grads.down_bias = gradient_of_bias(scale, grad_y, routed.groups);
  if (a.weights.has_value()) grad_activated.mul_(scale);
  overwrite_with_gradient(a.kind(), grad_activated, gate, up);
}

Tensor gradient_of_x(const Tensor& grad_z, const ExpertFfnArguments& a, const RoutedTensors& routed) {
  const auto of_rows = [&](const Tensor& grad, const Tensor& matrices) {
    return multiply_rows(grad, matrices.transpose(1, 2), routed.groups, std::nullopt);
  };
  if (!a.gate.has_value()) return sum_of_rows(of_rows(grad_z, a.up), routed, a.top_k, std::nullopt);
  const auto [grad_gate, grad_up] = gate_and_up(GateLayout::concatenated, grad_z);
  return sum_of_rows(of_rows(grad_gate, *a.gate).add_(of_rows(grad_up, a.up)), routed, a.top_k, std::nullopt);
}

void backward_up(const Tensor& grad_z, const Wanted& wanted, const ExpertFfnArguments& a, const RoutedTensors& routed,
                 Gradients& grads) {
  const int64_t gate_width = a.gate.has_value() ? a.gate->size(2) : 0;
  const Tensor grad_gate = grad_z.narrow(1, 0, gate_width);
  const Tensor grad_up = grad_z.narrow(1, gate_width, a.up.size(2));
  if (wanted.gate || wanted.up) {
    const Tensor tokens = a.x.index_select(0, routed.token_of_row);
    if (wanted.gate) grads.gate = gradient_of_matrices(*a.gate, tokens, grad_gate, routed.groups);
    if (wanted.up) grads.up = gradient_of_matrices(a.up, tokens, grad_up, routed.groups);
  }
  const Tensor ones = at::ones({grad_z.size(0), 1}, a.x.options());
  if (wanted.gate_bias) grads.gate_bias = gradient_of_bias(ones, grad_gate, routed.groups);
  if (wanted.up_bias) grads.up_bias = gradient_of_bias(ones, grad_up, routed.groups);
}

}  // namespace

Outputs expert_ffn_aten(const ExpertFfnArguments& a) {
  const RoutedTensors routed = routed_tensors(a);
  const Tensor z = preactivations_aten(a, routed);
  const auto [gate, up] = gate_and_up(a.gate_layout(), z);
  const Tensor row_outputs = multiply_rows(activated_rows(a.kind(), gate, up), a.down, routed.groups, a.down_bias);
  return {sum_of_rows(row_outputs, routed, a.top_k, a.weights), z};
}

Gradients expert_ffn_backward_aten(const Tensor& grad_out, const Tensor& preactivations, const Wanted& wanted,
                                   const ExpertFfnArguments& a) {
  const RoutedTensors routed = routed_tensors(a);
  const Tensor z = a.recompute ? preactivations_aten(a, routed) : preactivations;
  const Tensor none = at::empty({0}, a.x.options());
  Gradients grads{none, none.to(accumulator_type(a.x.scalar_type())), none, none, none, none, none, none};
  backward_down(grad_out, z, wanted, a, routed, grads);
  if (wanted.x) grads.x = gradient_of_x(z, a, routed);
  backward_up(z, wanted, a, routed, grads);
  return grads;
}

}  // namespace maxmoe::ops
