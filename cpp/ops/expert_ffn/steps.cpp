#include "ops/expert_ffn/steps.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "ops/operators.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// A slot of -1, of a row of nobody, gives any token.
Tensor tokens_of_rows(const ExpertFfnArguments& a, bool is_differentiable) {
  if (is_differentiable) return {};
  return a.top_k == 1 ? a.slots.clamp_min(0) : a.slots.div(a.top_k, "trunc");
}

}  // namespace

Steps::Steps(const ExpertFfnArguments& a, Differentiable differentiable)
    : is_differentiable(differentiable == Differentiable::yes),
      // Wider than 16 bits, because rounding after every elementwise operation makes second derivatives inaccurate.
      elementwise_type(is_differentiable ? accumulator_type(a.x.scalar_type()) : a.x.scalar_type()),
      a_(a),
      groups_(row_groups(a.group_sizes, 0, a.group_sizes.size(0))),
      token_of_row_(tokens_of_rows(a, is_differentiable)) {}

Tensor Steps::rows_of_tokens(const Tensor& x) const {
  if (is_differentiable) return ragged_sort(x, a_.slots, a_.rows, a_.top_k, std::nullopt);
  return x.index_select(0, token_of_row_);
}

Tensor Steps::weighted_rows_of_tokens(const Tensor& x) const {
  if (is_differentiable) return ragged_sort(x, a_.slots, a_.rows, a_.top_k, a_.weights);
  if (!a_.weights.has_value()) return rows_of_tokens(x);
  return weighted_rows(x, token_of_row_, weights_of_rows());
}

Tensor Steps::weighted_sum_of_rows(std::initializer_list<std::function<Tensor()>> tensors) const {
  if (!is_differentiable) return RowSums::of_groups(a_.rows, a_.top_k, a_.weights, a_.x.scalar_type())(tensors);
  Tensor rows;
  for (const auto& make_rows : tensors) rows = rows.defined() ? rows + make_rows() : make_rows();
  return ragged_gather_reduce(rows, a_.rows, a_.top_k, a_.weights, std::nullopt);
}

Tensor Steps::multiply_rows(const Tensor& rows, const Projection& projection) const {
  if (!is_differentiable) return ops::multiply_rows(rows, projection.weights(), groups_, projection.bias);
  Projection matrices = projection;
  matrices.a = matrices.b = std::nullopt;
  return gmm(rows, matrices, a_.group_sizes, 0);
}

Tensor Steps::multiply_groups(const Tensor& lhs, const Tensor& rhs) const {
  if (is_differentiable) return tgmm(lhs, rhs, a_.group_sizes, groups_.size(), 0);
  return ops::multiply_groups(lhs, rhs, groups_);
}

Tensor Steps::rows_of_biases(const Tensor& biases) const {
  return biases.index_select(0, groups_.of_rows(a_.slots.size(0)));
}

Tensor Steps::weights_of_rows() const {
  return a_.weights->reshape(-1).index_select(0, a_.slots.clamp_min(0));
}

Tensor Steps::times_weights(const Tensor& rows) const {
  if (!a_.weights.has_value()) return rows;
  const auto type = accumulator_type(rows.scalar_type());
  return (rows.to(type) * weights_of_rows().to(type).unsqueeze(1)).to(rows.scalar_type());
}

Tensor Steps::column_of_weights() const {
  if (!a_.weights.has_value()) return at::ones({a_.slots.size(0), 1}, a_.x.options());
  return weights_of_rows().to(a_.x.scalar_type()).unsqueeze(1);
}

Tensor Steps::slots_of_rows(const Tensor& values) const {
  if (values.numel() == 0) return at::zeros({a_.rows.numel()}, values.options());
  return values.index_select(0, a_.rows.clamp_min(0)).masked_fill(a_.rows.lt(0), 0);
}

Projected project(const Tensor& rows, const Projection& projection, const Steps& steps) {
  Tensor product = steps.multiply_rows(rows, projection);
  if (!projection.has_factors()) return {product, {}};
  const Tensor reduced = steps.multiply_rows(rows, {*projection.a});
  const Tensor term = steps.multiply_rows(reduced, {*projection.b});
  return {steps.is_differentiable ? product + term : product.add_(term), reduced};
}

Preactivations Preactivations::in(const Tensor& saved, const ExpertFfnArguments& a) {
  if (!a.gate.is_given()) return {Tensor(), saved};
  const Tensor both = saved.contiguous().view({2, saved.size(0), a.up_width()});
  return {both.select(0, 0), both.select(0, 1)};
}

std::pair<Tensor, Tensor> Preactivations::parts(GateLayout layout, at::ScalarType type) const {
  if (layout == GateLayout::separate) return {gate.to(type), up.to(type)};
  return gate_and_up(layout, up.to(type));
}

ProjectedTokens project_tokens(const ExpertFfnArguments& a, const Steps& steps, bool is_saved) {
  const Tensor tokens = steps.rows_of_tokens(a.x);
  if (!a.gate.is_given()) {
    const auto [up, reduced] = project(tokens, a.up, steps);
    return {{Tensor(), up}, up, {}, reduced};
  }
  const Tensor saved = is_saved ? at::empty({tokens.size(0), a.preactivation_width()}, tokens.options()) : Tensor();
  Preactivations z = is_saved ? Preactivations::in(saved, a) : Preactivations{};
  // The products are computed one after the other, so that only one of them is in memory beside `saved`.
  const auto store = [](Tensor& columns, const Projected& projected) {
    columns = columns.defined() ? columns.copy_(projected.rows) : projected.rows;
    return projected.reduced;
  };
  const Tensor reduced_gate = store(z.gate, project(tokens, a.gate, steps));
  const Tensor reduced_up = store(z.up, project(tokens, a.up, steps));
  return {z, saved, reduced_gate, reduced_up};
}

Reduced Reduced::in(const Tensor& columns, const ExpertFfnArguments& a) {
  int64_t begin = 0;
  const auto next = [&](const Projection& projection) {
    const Tensor part = columns.narrow(1, begin, projection.rank());
    begin += projection.rank();
    return part;
  };
  // Braces fix the order of the calls.
  return {next(a.gate), next(a.up), next(a.down)};
}

Tensor Reduced::side_by_side(const ExpertFfnArguments& a) const {
  std::vector<Tensor> given;
  for (const Tensor& rows : {gate, up, down}) {
    if (rows.defined()) given.push_back(rows);
  }
  return given.empty() ? at::empty({a.slots.size(0), 0}, a.x.options()) : at::cat(given, 1);
}

}  // namespace maxmoe::ops
