// gmm with low-rank factors beside rhs. It is its own transpose: the gradient of lhs is the product with rhs^T and with
// the factors b^T and a^T in the places of a and b, and the rows reduced on the way are what the gradient of a needs.
#include "ops/gmm.h"

namespace maxmoe::ops {
namespace {

void check_factors(const Tensor& lhs, const Weights& rhs, const Tensor& a, const Tensor& b) {
  Argument(kGmm, "a", a).has_dims(3, "[L, D, r]").has_dtype_of("lhs", lhs);
  Argument(kGmm, "a", a).has_size(0, rhs.count(), "L of rhs").has_size(1, rhs.in_size(), "D of rhs");
  Argument(kGmm, "b", b).has_dims(3, "[L, r, F]").has_dtype_of("lhs", lhs);
  Argument(kGmm, "b", b).has_size(0, rhs.count(), "L of rhs").has_size(1, a.size(2), "r of a");
  Argument(kGmm, "b", b).has_size(2, rhs.out_size(), "F of rhs");
}

// Product and reduced rows.
using Outputs = std::tuple<Tensor, Tensor>;

Outputs gmm_low_rank_backend(const Tensor& lhs, const Tensor& rhs_tensor, const Tensor& a, const Tensor& b,
                             const Tensor& group_sizes, const OptionalTensor& bias, int64_t group_offset,
                             const OptionalTensor& rhs_scales, const OptionalTensor& rhs_zeros,
                             std::optional<std::string_view> rhs_format, int64_t rhs_columns, bool rhs_is_transposed) {
  const Weights rhs{rhs_tensor, rhs_scales, rhs_zeros, rhs_format, rhs_columns, rhs_is_transposed};
  check_gmm(lhs, rhs, group_sizes, bias);
  check_factors(lhs, rhs, a, b);
  const Tensor reduced = multiply_grouped(lhs, {a}, group_sizes, std::nullopt, group_offset);
  return {multiply_grouped(lhs, rhs, group_sizes, bias, group_offset, LowRankTerm{reduced, b}), reduced};
}

class GmmLowRankNode : public torch::autograd::Function<GmmLowRankNode> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& lhs, const Tensor& rhs_tensor, const Tensor& a,
                               const Tensor& b, const Tensor& group_sizes, const OptionalTensor& bias,
                               const Weights& rhs, int64_t group_offset) {
    const auto [out, reduced] = gmm_low_rank(lhs, rhs, a, b, group_sizes, bias, group_offset);
    ctx->save_for_backward(
        {lhs, rhs_tensor, defined_or_empty(rhs.scales), defined_or_empty(rhs.zeros), a, b, group_sizes, reduced});
    save_weights(ctx, rhs);
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["group_offset"] = group_offset;
    ctx->set_materialize_grads(false);
    return {out, reduced};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    const auto [lhs, rhs, scales, zeros, a, b, group_sizes, reduced] = saved_tensors<8>(ctx);
    const Tensor& grad = grads[0];
    const Operands operands{load_weights(ctx, rhs, scales, zeros), a, b, group_sizes,
                            ctx->saved_data["group_offset"].toInt()};
    // The gradient of the second output is defined in second derivatives alone.
    const auto [grad_lhs, grad_reduced] =
        grads[1].defined() ? operands.gradients(grad, grads[1])
                           : operands.gradients(grad, ctx->needs_input_grad(0), ctx->needs_input_grad(2));
    variable_list result(8);
    result[0] = grad_lhs;
    const auto multiply_groups = [&, group_sizes = group_sizes](const Tensor& left, const Tensor& right) {
      return tgmm(left, right, group_sizes, operands.rhs.count(), operands.group_offset);
    };
    if (ctx->needs_input_grad(2) && grad_reduced.defined()) result[2] = multiply_groups(lhs, grad_reduced);
    if (!grad.defined()) return result;
    if (ctx->needs_input_grad(1)) result[1] = multiply_groups(lhs, grad);
    if (ctx->needs_input_grad(3)) result[3] = multiply_groups(reduced, grad);
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(5)) {
      result[5] = gradient_of_bias(grad, group_sizes, operands.rhs.count(), operands.group_offset);
    }
    return result;
  }

 private:
  // What the gradients of lhs and of the reduced rows are computed with.
  struct Operands {
    Weights rhs;
    Tensor a, b, group_sizes;
    int64_t group_offset;

    Tensor multiply(const Tensor& rows, const Weights& matrices) const {
      return gmm(rows, matrices.transposed(), group_sizes, std::nullopt, group_offset);
    }

    // The gradients of lhs and of the reduced rows, undefined where they are not needed.
    std::pair<Tensor, Tensor> gradients(const Tensor& grad, bool needs_lhs, bool needs_a) const {
      if (!grad.defined()) return {};
      if (!needs_lhs) return {Tensor(), needs_a ? multiply(grad, {b}) : Tensor()};
      const auto [grad_lhs, grad_reduced] = gmm_low_rank(grad, rhs.transposed(), b.transpose(1, 2), a.transpose(1, 2),
                                                         group_sizes, std::nullopt, group_offset);
      return {grad_lhs, grad_reduced};
    }

    // The same from the gradients of both outputs.
    std::pair<Tensor, Tensor> gradients(const Tensor& grad, const Tensor& grad_of_reduced) const {
      if (!grad.defined()) return {multiply(grad_of_reduced, {a}), grad_of_reduced};
      const Tensor grad_reduced = grad_of_reduced.add(multiply(grad, {b}));
      return {multiply(grad_reduced, {a}).add(multiply(grad, rhs)), grad_reduced};
    }
  };
};

struct GmmLowRankGradient {
  static Outputs apply(const Tensor& lhs, const Tensor& rhs_tensor, const Tensor& a, const Tensor& b,
                       const Tensor& group_sizes, const OptionalTensor& bias, int64_t group_offset,
                       const OptionalTensor& rhs_scales, const OptionalTensor& rhs_zeros,
                       std::optional<std::string_view> rhs_format, int64_t rhs_columns, bool rhs_is_transposed) {
    const Weights rhs{rhs_tensor, rhs_scales, rhs_zeros, rhs_format, rhs_columns, rhs_is_transposed};
    check_is_frozen(kGmm, "rhs", rhs_scales);
    const variable_list results = GmmLowRankNode::apply(lhs, rhs_tensor, a, b, group_sizes, bias, rhs, group_offset);
    return {results[0], results[1]};
  }

  static Outputs with_tangents(const Tensor& lhs, const Tensor& rhs_tensor, const Tensor& a, const Tensor& b,
                               const Tensor& group_sizes, const OptionalTensor& bias, int64_t group_offset,
                               const OptionalTensor& rhs_scales, const OptionalTensor& rhs_zeros,
                               std::optional<std::string_view> rhs_format, int64_t rhs_columns,
                               bool rhs_is_transposed) {
    const Weights rhs{rhs_tensor, rhs_scales, rhs_zeros, rhs_format, rhs_columns, rhs_is_transposed};
    const Tensor reduced = gmm(lhs, a, group_sizes, std::nullopt, group_offset);
    const Tensor term = gmm(reduced, b, group_sizes, std::nullopt, group_offset);
    return {gmm(lhs, rhs, group_sizes, bias, group_offset).add(term), reduced};
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  gmm_low_rank_operator.define<gmm_low_rank_backend, GmmLowRankGradient, Autocast::lower_precision>(
      library,
      "gmm_low_rank(Tensor lhs, Tensor rhs, Tensor a, Tensor b, " + kGmmOptions + ") -> (Tensor out, Tensor reduced)");
}

}  // namespace
}  // namespace maxmoe::ops
