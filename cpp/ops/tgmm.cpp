#include <algorithm>
#include <array>

#include "kernels/experts/tgmm.h"
#include "ops/backend.h"
#include "ops/grouped_mm.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kTgmm = "tgmm";

void check_tgmm(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, int64_t num_local_groups) {
  Argument(kTgmm, "lhs", lhs).has_dims(2, "[R, D]").is_floating();
  Argument(kTgmm, "rhs", rhs).has_dims(2, "[R, F]").has_dtype_of("lhs", lhs);
  Argument(kTgmm, "rhs", rhs).has_size(0, lhs.size(0), "R of lhs");
  MAXMOE_CHECK(num_local_groups >= 0, kTgmm, "num_local_groups must not be negative, got ", num_local_groups);
  check_group_sizes(kTgmm, group_sizes, lhs.size(0), Sum::at_most);
}

Tensor tgmm_backend(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, int64_t num_local_groups,
                    int64_t group_offset) {
  check_tgmm(lhs, rhs, group_sizes, num_local_groups);
  // Beyond these bounds no group is local. Clamping keeps sums with group_offset from overflowing.
  group_offset = std::clamp(group_offset, -num_local_groups, group_sizes.size(0));
  const std::array<int64_t, 3> shape{num_local_groups, lhs.size(1), rhs.size(1)};
  if (shape[1] == 0 || shape[2] == 0) return empty(shape, lhs.options());  // num_local_groups may be huge
  if (!uses_kernels(lhs)) return multiply_groups(lhs, rhs, row_groups(group_sizes, group_offset, num_local_groups));
  const Tensor out = empty(shape, lhs.options());
  if (out.numel() == 0) return out;
  const Tensor left = gemm_operand(lhs);
  const Tensor right = gemm_operand(rhs);
  const Tensor sizes = group_sizes.contiguous();
  for_dtype(lhs.scalar_type(), [&]<class T>() {
    maxmoe::tgmm(Tgmm<T>{const_view<T>(left), const_view<T>(right), const_pointer<int64_t>(sizes), sizes.numel(),
                         group_offset, &best_gemm<T>(), stack<T>(out)},
                 torch_executor());
  });
  return out;
}

class TgmmGradient : public torch::autograd::Function<TgmmGradient> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes,
                        int64_t num_local_groups, int64_t group_offset) {
    // The gradient of each factor needs the other one.
    ctx->save_for_backward({rhs.requires_grad() ? lhs : Tensor(), lhs.requires_grad() ? rhs : Tensor(), group_sizes});
    ctx->saved_data["group_offset"] = group_offset;
    return tgmm(lhs, rhs, group_sizes, num_local_groups, group_offset);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    const auto [lhs, rhs, group_sizes] = saved_tensors<3>(ctx);
    const int64_t group_offset = ctx->saved_data["group_offset"].toInt();
    Tensor grad_lhs;
    Tensor grad_rhs;
    if (ctx->needs_input_grad(0)) grad_lhs = gmm(rhs, Projection{grads[0].transpose(1, 2)}, group_sizes, group_offset);
    if (ctx->needs_input_grad(1)) grad_rhs = gmm(lhs, Projection{grads[0]}, group_sizes, group_offset);
    return {grad_lhs, grad_rhs, Tensor(), Tensor(), Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  tgmm.define<tgmm_backend, TgmmGradient, Autocast::lower_precision>(
      library,
      "tgmm(Tensor lhs, Tensor rhs, Tensor group_sizes, int num_local_groups, *, int group_offset=0) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
