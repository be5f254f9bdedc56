// rhs may be a quantized stack, which has no gradient.
#include "ops/gmm.h"

#include <ATen/ops/ones.h>

namespace maxmoe::ops {
namespace {

Tensor gmm_backend(const Tensor& lhs, const Tensor& rhs_tensor, const Tensor& group_sizes, const OptionalTensor& bias,
                   int64_t group_offset, const OptionalTensor& rhs_scales, const OptionalTensor& rhs_zeros,
                   std::optional<std::string_view> rhs_format, int64_t rhs_columns, bool rhs_is_transposed) {
  const Weights rhs{rhs_tensor, rhs_scales, rhs_zeros, rhs_format, rhs_columns, rhs_is_transposed};
  check_gmm(lhs, rhs, group_sizes, bias);
  return multiply_grouped(lhs, rhs, group_sizes, bias, group_offset);
}

class GmmNode : public torch::autograd::Function<GmmNode> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& lhs, const Tensor& rhs_tensor, const Tensor& group_sizes,
                        const OptionalTensor& bias, const Weights& rhs, int64_t group_offset) {
    const Tensor out = gmm(lhs, rhs, group_sizes, bias, group_offset);
    // The gradient of each factor needs the other one.
    const bool keeps_rhs = lhs.requires_grad();
    ctx->save_for_backward({rhs_tensor.requires_grad() ? lhs : Tensor(), keeps_rhs ? rhs_tensor : Tensor(),
                            keeps_rhs ? defined_or_empty(rhs.scales) : Tensor(),
                            keeps_rhs ? defined_or_empty(rhs.zeros) : Tensor(), group_sizes});
    save_weights(ctx, rhs);
    ctx->saved_data["has_bias"] = bias.has_value();
    ctx->saved_data["num_local_groups"] = rhs.count();
    ctx->saved_data["group_offset"] = group_offset;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    const auto [lhs, rhs, scales, zeros, group_sizes] = saved_tensors<5>(ctx);
    const Tensor& grad = grads[0];
    const int64_t num_local_groups = ctx->saved_data["num_local_groups"].toInt();
    const int64_t group_offset = ctx->saved_data["group_offset"].toInt();
    variable_list result(6);
    if (ctx->needs_input_grad(0)) {
      const Weights transposed = load_weights(ctx, rhs, scales, zeros).transposed();
      result[0] = gmm(grad, transposed, group_sizes, std::nullopt, group_offset);
    }
    if (ctx->needs_input_grad(1)) result[1] = tgmm(lhs, grad, group_sizes, num_local_groups, group_offset);
    if (ctx->saved_data["has_bias"].toBool() && ctx->needs_input_grad(3)) {
      result[3] = gradient_of_bias(grad, group_sizes, num_local_groups, group_offset);
    }
    return result;
  }
};

struct GmmGradient {
  static Tensor apply(const Tensor& lhs, const Tensor& rhs_tensor, const Tensor& group_sizes,
                      const OptionalTensor& bias, int64_t group_offset, const OptionalTensor& rhs_scales,
                      const OptionalTensor& rhs_zeros, std::optional<std::string_view> rhs_format, int64_t rhs_columns,
                      bool rhs_is_transposed) {
    const Weights rhs{rhs_tensor, rhs_scales, rhs_zeros, rhs_format, rhs_columns, rhs_is_transposed};
    check_is_frozen(kGmm, "rhs", rhs_scales);
    return GmmNode::apply(lhs, rhs_tensor, group_sizes, bias, rhs, group_offset);
  }

  // With a bias the operator is not linear in lhs and rhs. So the bias is written as a product with a column of ones.
  static Tensor with_tangents(const Tensor& lhs, const Tensor& rhs_tensor, const Tensor& group_sizes,
                              const OptionalTensor& bias, int64_t group_offset, const OptionalTensor& rhs_scales,
                              const OptionalTensor& rhs_zeros, std::optional<std::string_view> rhs_format,
                              int64_t rhs_columns, bool rhs_is_transposed) {
    const Weights rhs{rhs_tensor, rhs_scales, rhs_zeros, rhs_format, rhs_columns, rhs_is_transposed};
    check_is_frozen(kGmm, "rhs", rhs_scales);
    check_weights(kGmm, "rhs", "[L, D, F]", rhs);
    const Tensor matrices = rhs.dequantized(lhs.scalar_type());
    const auto multiply = [](const auto&... arguments) { return gmm(arguments...); };
    if (!bias.has_value()) return product_rule(multiply, lhs, matrices, group_sizes, bias, group_offset);
    const Tensor ones = at::ones({lhs.size(0), 1}, lhs.options());
    return gmm(lhs, matrices, group_sizes, std::nullopt, group_offset)
        .add(gmm(ones, bias->unsqueeze(1), group_sizes, std::nullopt, group_offset));
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  gmm_operator.define<gmm_backend, GmmGradient, Autocast::lower_precision>(
      library, "gmm(Tensor lhs, Tensor rhs, " + kGmmOptions + ") -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
