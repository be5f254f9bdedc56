// expert_ffn of the other operators and of ATen's, one after the other: for forward-mode AD and second derivatives.
#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "ops/expert_ffn.h"
#include "ops/gmm.h"
#include "ops/ragged_sort.h"
#include "ops/ragged_unsort.h"
#include "ops/tgmm.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

Tensor preactivations_composed(const ExpertFfnArguments& a) {
  const Tensor tokens = ragged_sort(a.x, a.slots, a.rows, a.top_k, std::nullopt);
  const Tensor up = gmm(tokens, a.up, a.group_sizes, a.up_bias, 0);
  if (!a.gate.has_value()) return up;
  return at::cat({gmm(tokens, *a.gate, a.group_sizes, a.gate_bias, 0), up}, 1);
}

}  // namespace

Tensor expert_ffn_composed(const ExpertFfnArguments& a) {
  const auto type = accumulator_type(a.x.scalar_type());
  const auto [gate, up] = gate_and_up(a.gate_layout(), preactivations_composed(a).to(type));
  const Tensor activated = activate(a.kind(), gate, up).activated.to(a.x.scalar_type());
  const Tensor row_outputs = gmm(activated, a.down, a.group_sizes, a.down_bias, 0);
  return ragged_unsort(row_outputs, a.slots, a.rows, a.top_k, a.weights);
}

Gradients expert_ffn_backward_composed(const Tensor& grad_out, const Wanted& wanted, const ExpertFfnArguments& a) {
  const auto type = accumulator_type(a.x.scalar_type());
  const auto dtype = a.x.scalar_type();
  const int64_t num_groups = a.group_sizes.size(0);
  const Tensor none = at::empty({0}, a.x.options());
  const Tensor ones = at::ones({a.slots.size(0), 1}, a.x.options());
  const auto [gate, up] = gate_and_up(a.gate_layout(), preactivations_composed(a).to(type));
  const ActivatedTensors act = activate(a.kind(), gate, up);
  const Tensor scale = a.weights.has_value()
                           ? a.weights->reshape(-1).index_select(0, a.slots.clamp_min(0)).to(type).unsqueeze(1)
                           : ones.to(type);

  const Tensor grad_y = ragged_sort(grad_out, a.slots, a.rows, a.top_k, std::nullopt);
  const Tensor grad_activated = gmm(grad_y, a.down.transpose(1, 2), a.group_sizes, std::nullopt, 0).to(type);
  const Tensor weighted = scale * grad_activated;
  const Tensor grad_preactivations =
      preactivations_of(a.gate_layout(), gate.defined() ? weighted * act.gate_slope : Tensor(), weighted * act.up_slope)
          .to(dtype);
  const int64_t gate_width = a.gate.has_value() ? a.gate->size(2) : 0;
  const Tensor grad_gate = grad_preactivations.narrow(1, 0, gate_width);
  const Tensor grad_up = grad_preactivations.narrow(1, gate_width, a.up.size(2));

  Tensor grad_x = none;
  if (wanted.x) {
    grad_x = gmm(grad_up, a.up.transpose(1, 2), a.group_sizes, std::nullopt, 0);
    if (a.gate.has_value()) grad_x = grad_x + gmm(grad_gate, a.gate->transpose(1, 2), a.group_sizes, std::nullopt, 0);
    grad_x = ragged_unsort(grad_x, a.slots, a.rows, a.top_k, std::nullopt);
  }
  Tensor grad_weights = at::zeros({wanted.weights ? a.rows.numel() : 0}, a.x.options().dtype(type));
  if (wanted.weights && a.slots.numel() > 0) {
    Tensor of_rows = (grad_activated * act.activated).sum(1);
    if (a.down_bias.has_value()) {
      const Tensor bias = gmm(ones, a.down_bias->unsqueeze(1), a.group_sizes, std::nullopt, 0);
      of_rows = of_rows + (grad_y.to(type) * bias.to(type)).sum(1);
    }
    grad_weights = of_rows.index_select(0, a.rows.clamp_min(0)).masked_fill(a.rows.lt(0), 0);
  }
  const Tensor tokens = ragged_sort(a.x, a.slots, a.rows, a.top_k, std::nullopt);
  // In the memory layout of the matrices.
  const auto of_matrices = [&](bool is_wanted, const OptionalTensor& matrices, const Tensor& lhs, const Tensor& rhs) {
    if (!is_wanted) return none;
    if (is_transposed(*matrices)) return tgmm(rhs, lhs, a.group_sizes, num_groups, 0).transpose(1, 2);
    return tgmm(lhs, rhs, a.group_sizes, num_groups, 0);
  };
  const auto of_bias = [&](bool is_wanted, const Tensor& lhs, const Tensor& rhs) {
    return is_wanted ? tgmm(lhs, rhs, a.group_sizes, num_groups, 0).squeeze(1) : none;
  };
  return {grad_x,
          grad_weights,
          of_matrices(wanted.gate, a.gate, tokens, grad_gate),
          of_matrices(wanted.up, a.up, tokens, grad_up),
          of_matrices(wanted.down, a.down, (scale * act.activated).to(dtype), grad_y),
          of_bias(wanted.gate_bias, ones, grad_gate),
          of_bias(wanted.up_bias, ones, grad_up),
          of_bias(wanted.down_bias, scale.to(dtype), grad_y)};
}

}  // namespace maxmoe::ops
