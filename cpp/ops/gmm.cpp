// Two operators. gmm_low_rank is gmm with low-rank factors beside rhs. It is its own transpose: the gradient of lhs is
// the product with rhs^T and with the factors b^T and a^T in the places of a and b, and the rows reduced on the way are
// what the gradient of a needs.
#include <ATen/ops/ones.h>

#include <algorithm>

#include "kernels/gmm.h"
#include "ops/backend.h"
#include "ops/grouped_mm.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// The name in all messages, because users call only gmm.
constexpr const char* kOp = "gmm";

void check(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, const OptionalTensor& bias) {
  Argument(kOp, "lhs", lhs).has_dims(2, "[R, D]").is_floating();
  Argument(kOp, "rhs", rhs).has_dims(3, "[L, D, F]").has_dtype_of("lhs", lhs);
  Argument(kOp, "rhs", rhs).has_size(1, lhs.size(1), "D of lhs");
  if (bias.has_value()) {
    Argument(kOp, "bias", *bias).has_dims(2, "[L, F]").has_dtype_of("lhs", lhs);
    Argument(kOp, "bias", *bias).has_size(0, rhs.size(0), "L of rhs").has_size(1, rhs.size(2), "F of rhs");
  }
  check_group_sizes(kOp, group_sizes, lhs.size(0), Sum::at_most);
}

void check_factors(const Tensor& lhs, const Tensor& rhs, const Tensor& a, const Tensor& b) {
  Argument(kOp, "a", a).has_dims(3, "[L, D, r]").has_dtype_of("lhs", lhs);
  Argument(kOp, "a", a).has_size(0, rhs.size(0), "L of rhs").has_size(1, rhs.size(1), "D of rhs");
  Argument(kOp, "b", b).has_dims(3, "[L, r, F]").has_dtype_of("lhs", lhs);
  Argument(kOp, "b", b).has_size(0, rhs.size(0), "L of rhs").has_size(1, a.size(2), "r of a");
  Argument(kOp, "b", b).has_size(2, rhs.size(2), "F of rhs");
}

// Rows of no group are zero, as the kernel writes them.
Tensor gmm_aten(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
                int64_t group_offset) {
  const RowGroups groups = row_groups(group_sizes, group_offset, rhs.size(0));
  return multiply_rows(lhs, rhs, groups, bias).masked_fill_(groups.rows_of_no_group(lhs.size(0)), 0);
}

// The term that low-rank factors add: reduced [R, r] times the matrices of `expand` [L, r, F].
struct LowRankTerm {
  Tensor reduced;
  Tensor expand;
};

Tensor gmm_kernel(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
                  int64_t group_offset, const std::optional<LowRankTerm>& term) {
  const Tensor out = empty({lhs.size(0), rhs.size(2)}, lhs.options());
  if (out.numel() == 0) return out;
  const Tensor left = gemm_operand(lhs);
  const Tensor right = gemm_operand(rhs);
  const Tensor sizes = group_sizes.contiguous();
  const auto offsets = bias.has_value() ? OptionalTensor(bias->contiguous()) : std::nullopt;
  const bool has_term = term.has_value() && term->reduced.size(1) > 0;
  const Tensor expand = has_term ? gemm_operand(term->expand) : Tensor();
  for_dtype(lhs.scalar_type(), [&]<class T>() {
    Gmm<T> arguments{const_view<T>(left),
                     const_stack<T>(right),
                     offsets.has_value() ? const_view<T>(*offsets) : ConstMatrixView<T>{},
                     const_pointer<int64_t>(sizes),
                     sizes.numel(),
                     group_offset,
                     &best_gemm<T>(),
                     view<T>(out)};
    if (has_term) {
      arguments.reduced = const_view<T>(term->reduced);
      arguments.expand = const_stack<T>(expand);
    }
    maxmoe::gmm(arguments, torch_executor());
  });
  return out;
}

// Beyond these bounds no group is local. Clamping keeps sums with group_offset from overflowing.
int64_t clamped_offset(int64_t group_offset, const Tensor& rhs, const Tensor& group_sizes) {
  return std::clamp(group_offset, -rhs.size(0), group_sizes.size(0));
}

Tensor gmm_backend(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
                   int64_t group_offset) {
  check(lhs, rhs, group_sizes, bias);
  group_offset = clamped_offset(group_offset, rhs, group_sizes);
  if (!uses_kernels(lhs)) return gmm_aten(lhs, rhs, group_sizes, bias, group_offset);
  return gmm_kernel(lhs, rhs, group_sizes, bias, group_offset, std::nullopt);
}

// Product and reduced rows.
using Outputs = std::tuple<Tensor, Tensor>;

Outputs gmm_low_rank_backend(const Tensor& lhs, const Tensor& rhs, const Tensor& a, const Tensor& b,
                             const Tensor& group_sizes, const OptionalTensor& bias, int64_t group_offset) {
  check(lhs, rhs, group_sizes, bias);
  check_factors(lhs, rhs, a, b);
  group_offset = clamped_offset(group_offset, rhs, group_sizes);
  if (!uses_kernels(lhs)) {
    const Tensor reduced = gmm_aten(lhs, a, group_sizes, std::nullopt, group_offset);
    const Tensor out = gmm_aten(lhs, rhs, group_sizes, bias, group_offset);
    return {out.add_(gmm_aten(reduced, b, group_sizes, std::nullopt, group_offset)), reduced};
  }
  const Tensor reduced = gmm_kernel(lhs, a, group_sizes, std::nullopt, group_offset, std::nullopt);
  return {gmm_kernel(lhs, rhs, group_sizes, bias, group_offset, LowRankTerm{reduced, b}), reduced};
}

// The gradient of a bias: the sum of the rows of each group, as a product with a column of ones.
Tensor gradient_of_bias(const Tensor& grad, const Tensor& group_sizes, int64_t num_local_groups, int64_t group_offset) {
  const Tensor ones = at::ones_symint({grad.sym_size(0), 1}, grad.options());
  return tgmm(ones, grad, group_sizes, num_local_groups, group_offset).squeeze(1);
}

class Gradient : public torch::autograd::Function<Gradient> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes,
                        const OptionalTensor& bias, int64_t group_offset) {
    const Tensor out = gmm(lhs, rhs, group_sizes, bias, group_offset);
    // The gradient of each factor needs the other one.
    ctx->save_for_backward({rhs.requires_grad() ? lhs : Tensor(), lhs.requires_grad() ? rhs : Tensor(), group_sizes});
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["num_local_groups"] = rhs.size(0);
    ctx->saved_data["group_offset"] = group_offset;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto [lhs, rhs, group_sizes] = saved_tensors<3>(ctx);
    const Tensor& grad = grads[0];
    const int64_t num_local_groups = ctx->saved_data["num_local_groups"].toInt();
    const int64_t group_offset = ctx->saved_data["group_offset"].toInt();
    Tensor grad_lhs;
    Tensor grad_rhs;
    Tensor grad_bias;
    if (ctx->needs_input_grad(0)) grad_lhs = gmm(grad, rhs.transpose(1, 2), group_sizes, std::nullopt, group_offset);
    if (ctx->needs_input_grad(1)) grad_rhs = tgmm(lhs, grad, group_sizes, num_local_groups, group_offset);
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(3)) {
      grad_bias = gradient_of_bias(grad, group_sizes, num_local_groups, group_offset);
    }
    return {grad_lhs, grad_rhs, Tensor(), grad_bias, Tensor()};
  }

  // With a bias the operator is not linear in lhs and rhs. So the bias is written as a product with a column of ones.
  static Tensor with_tangents(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes,
                              const OptionalTensor& bias, int64_t group_offset) {
    if (!bias.has_value()) return product_rule(gmm, lhs, rhs, group_sizes, bias, group_offset);
    const Tensor ones = at::ones({lhs.size(0), 1}, lhs.options());
    return gmm(lhs, rhs, group_sizes, std::nullopt, group_offset)
        .add(gmm(ones, bias->unsqueeze(1), group_sizes, std::nullopt, group_offset));
  }
};

class LowRankNode : public torch::autograd::Function<LowRankNode> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& lhs, const Tensor& rhs, const Tensor& a,
                               const Tensor& b, const Tensor& group_sizes, const OptionalTensor& bias,
                               int64_t group_offset) {
    const auto [out, reduced] = gmm_low_rank(lhs, rhs, a, b, group_sizes, bias, group_offset);
    ctx->save_for_backward({lhs, rhs, a, b, group_sizes, reduced});
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["group_offset"] = group_offset;
    ctx->set_materialize_grads(false);
    return {out, reduced};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto [lhs, rhs, a, b, group_sizes, reduced] = saved_tensors<6>(ctx);
    const Tensor& grad = grads[0];
    const Operands operands{rhs, a, b, group_sizes, ctx->saved_data["group_offset"].toInt()};
    // The gradient of the second output is defined in second derivatives alone.
    const auto [grad_lhs, grad_reduced] =
        grads[1].defined() ? operands.gradients(grad, grads[1])
                           : operands.gradients(grad, ctx->needs_input_grad(0), ctx->needs_input_grad(2));
    variable_list result(7);
    result[0] = grad_lhs;
    const auto multiply_groups = [&, group_sizes = group_sizes](const Tensor& left, const Tensor& right) {
      return tgmm(left, right, group_sizes, operands.rhs.size(0), operands.group_offset);
    };
    if (ctx->needs_input_grad(2) && grad_reduced.defined()) result[2] = multiply_groups(lhs, grad_reduced);
    if (!grad.defined()) return result;
    if (ctx->needs_input_grad(1)) result[1] = multiply_groups(lhs, grad);
    if (ctx->needs_input_grad(3)) result[3] = multiply_groups(reduced, grad);
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(5)) {
      result[5] = gradient_of_bias(grad, group_sizes, rhs.size(0), operands.group_offset);
    }
    return result;
  }

 private:
  // What the gradients of lhs and of the reduced rows are computed with.
  struct Operands {
    Tensor rhs, a, b, group_sizes;
    int64_t group_offset;

    Tensor multiply(const Tensor& rows, const Tensor& matrices) const {
      return gmm(rows, matrices.transpose(1, 2), group_sizes, std::nullopt, group_offset);
    }

    // The gradients of lhs and of the reduced rows, undefined where they are not needed.
    std::pair<Tensor, Tensor> gradients(const Tensor& grad, bool needs_lhs, bool needs_a) const {
      if (!grad.defined()) return {};
      if (!needs_lhs) return {Tensor(), needs_a ? multiply(grad, b) : Tensor()};
      const auto [grad_lhs, grad_reduced] = gmm_low_rank(grad, rhs.transpose(1, 2), b.transpose(1, 2),
                                                         a.transpose(1, 2), group_sizes, std::nullopt, group_offset);
      return {grad_lhs, grad_reduced};
    }

    // The same from the gradients of both outputs.
    std::pair<Tensor, Tensor> gradients(const Tensor& grad, const Tensor& grad_of_reduced) const {
      if (!grad.defined()) return {multiply(grad_of_reduced, a), grad_of_reduced};
      const Tensor grad_reduced = grad_of_reduced.add(multiply(grad, b));
      return {multiply(grad_reduced, a).add(multiply(grad, rhs)), grad_reduced};
    }
  };
};

struct LowRankGradient {
  static Outputs apply(const auto&... arguments) {
    const variable_list results = LowRankNode::apply(arguments...);
    return {results[0], results[1]};
  }

  static Outputs with_tangents(const Tensor& lhs, const Tensor& rhs, const Tensor& a, const Tensor& b,
                               const Tensor& group_sizes, const OptionalTensor& bias, int64_t group_offset) {
    const Tensor reduced = gmm(lhs, a, group_sizes, std::nullopt, group_offset);
    const Tensor term = gmm(reduced, b, group_sizes, std::nullopt, group_offset);
    return {gmm(lhs, rhs, group_sizes, bias, group_offset).add(term), reduced};
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  gmm.define<gmm_backend, Gradient, Autocast::lower_precision>(
      library, "gmm(Tensor lhs, Tensor rhs, Tensor group_sizes, *, Tensor? bias=None, int group_offset=0) -> Tensor");
  gmm_low_rank.define<gmm_low_rank_backend, LowRankGradient, Autocast::lower_precision>(
      library,
      "gmm_low_rank(Tensor lhs, Tensor rhs, Tensor a, Tensor b, Tensor group_sizes, *, Tensor? bias=None, int "
      "group_offset=0) -> (Tensor out, Tensor reduced)");
}

}  // namespace
}  // namespace maxmoe::ops
