#include <algorithm>
#include <array>

#include "kernels/experts/tgmm.h"
#include "ops/backend.h"
#include "ops/grouped_mm.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/registration.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

Tensor tgmm_backend(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, int64_t num_local_groups,
                    int64_t group_offset) {
  constexpr const char* kOp = "tgmm";
  Argument(kOp, "lhs", lhs).has_dims(2, "[R, D]").is_floating();
  Argument(kOp, "rhs", rhs).has_dims(2, "[R, F]").has_dtype_of("lhs", lhs).has_size(0, lhs.size(0), "R of lhs");
  MAXMOE_CHECK(num_local_groups >= 0, kOp, "num_local_groups must not be negative, got ", num_local_groups);
  check_group_sizes(kOp, group_sizes, lhs.size(0), Sum::at_most);
  // Beyond these bounds no group is local. Clamping keeps sums with group_offset from overflowing.
  group_offset = std::clamp(group_offset, -num_local_groups, group_sizes.size(0));
  const std::array<int64_t, 3> shape{num_local_groups, lhs.size(1), rhs.size(1)};
  if (shape[1] == 0 || shape[2] == 0) return empty(shape, lhs.options());  // num_local_groups may be huge
  if (!uses_kernels(lhs)) return multiply_groups(lhs, rhs, RowGroups(group_sizes, group_offset, num_local_groups));
  const Tensor out = empty(shape, lhs.options());
  if (out.numel() == 0) return out;
  for_dtype(lhs.scalar_type(), [&]<class T>() {
    maxmoe::tgmm(Tgmm<T>{Operand(lhs), Operand(rhs), List(group_sizes), group_sizes.numel(), group_offset,
                         &kernel_gemm<T>(), stack<T>(out)},
                 torch_executor());
  });
  return out;
}

variable_list tgmm_backward(WantedGradients wanted, const Tensor& grad, const Tensor& lhs, const Tensor& rhs,
                            const Tensor& group_sizes, int64_t /*num_local_groups*/, int64_t group_offset) {
  return {wanted[0] ? gmm(rhs, {grad.transpose(1, 2)}, group_sizes, group_offset) : Tensor(),
          wanted[1] ? gmm(lhs, {grad}, group_sizes, group_offset) : Tensor()};
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<tgmm, tgmm_backend, Recorded<tgmm, tgmm_backward>, Autocast::lower_precision>(
      library,
      "tgmm(Tensor lhs, Tensor rhs, Tensor group_sizes, int num_local_groups, *, int group_offset=0) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
