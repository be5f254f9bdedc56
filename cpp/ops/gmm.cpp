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

// Rows of no group are zero, as the kernel writes them.
Tensor gmm_aten(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
                int64_t group_offset) {
  const RowGroups groups = row_groups(group_sizes, group_offset, rhs.size(0));
  return multiply_rows(lhs, rhs, groups, bias).masked_fill_(groups.rows_of_no_group(lhs.size(0)), 0);
}

Tensor gmm_backend(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
                   int64_t group_offset) {
  check(lhs, rhs, group_sizes, bias);
  // Beyond these bounds no group is local. Clamping keeps sums with group_offset from overflowing.
  group_offset = std::clamp(group_offset, -rhs.size(0), group_sizes.size(0));
  if (!uses_kernels(lhs)) return gmm_aten(lhs, rhs, group_sizes, bias, group_offset);
  const Tensor out = empty({lhs.size(0), rhs.size(2)}, lhs.options());
  if (out.numel() == 0) return out;
  const Tensor left = gemm_operand(lhs);
  const Tensor right = gemm_operand(rhs);
  const Tensor sizes = group_sizes.contiguous();
  const auto offsets = bias.has_value() ? OptionalTensor(bias->contiguous()) : std::nullopt;
  for_dtype(lhs.scalar_type(), [&]<class T>() {
    maxmoe::gmm(Gmm<T>{const_view<T>(left), const_stack<T>(right),
                       offsets.has_value() ? const_view<T>(*offsets) : ConstMatrixView<T>{},
                       const_pointer<int64_t>(sizes), sizes.numel(), group_offset, &best_gemm<T>(), view<T>(out)},
                torch_executor());
  });
  return out;
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
      // The sum of the rows of each group, as a product with a column of ones.
      const Tensor ones = at::ones_symint({grad.sym_size(0), 1}, grad.options());
      grad_bias = tgmm(ones, grad, group_sizes, num_local_groups, group_offset).squeeze(1);
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

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  gmm.define<gmm_backend, Gradient, Autocast::lower_precision>(
      library, "gmm(Tensor lhs, Tensor rhs, Tensor group_sizes, *, Tensor? bias=None, int group_offset=0) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
