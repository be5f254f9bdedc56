// The checks and the product of gmm, through the kernel or ATen.
#include <algorithm>

#include "kernels/experts/gmm.h"
#include "ops/backend.h"
#include "ops/gmm/gmm.h"
#include "ops/grouped_mm.h"
#include "ops/memory.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// Rows of no group are zero, as the kernel writes them.
Tensor multiply_aten(const Tensor& lhs, const Weights& matrices, const OptionalTensor& bias, const RowGroups& groups) {
  return multiply_rows(lhs, matrices, groups, bias).masked_fill_(groups.rows_of_no_group(lhs.size(0)), 0);
}

Tensor multiply_kernel(const GmmArguments& a, int64_t group_offset, const Tensor& reduced) {
  const Tensor out = empty({a.lhs.size(0), a.rhs.out_size()}, a.lhs.options());
  if (out.numel() == 0) return out;
  const Tensor lhs = gemm_operand(a.lhs);
  const Projection rhs = a.rhs.in_kernel_layout();
  const Tensor sizes = a.group_sizes.contiguous();
  for_dtype(lhs.scalar_type(), [&]<class T>() {
    Gmm<T> arguments{const_view<T>(lhs),
                     projection_view<T>(rhs),
                     const_pointer<int64_t>(sizes),
                     sizes.numel(),
                     group_offset,
                     &best_gemm<T>(),
                     view<T>(out)};
    if (rhs.has_factors()) arguments.reduced = const_view<T>(reduced);
    maxmoe::gmm(arguments, torch_executor());
  });
  return out;
}

}  // namespace

void check_gmm_shapes(const GmmArguments& a) {
  const Projection& rhs = a.rhs;
  Argument(kGmm, "lhs", a.lhs).has_dims(2, "[R, D]").is_floating();
  MAXMOE_CHECK(rhs.is_given(), kGmm, "rhs must be given, got None");
  Argument(kGmm, "rhs", *rhs.tensor).has_dims(3, rhs.format.has_value() ? "[L, rows, bytes]" : "[L, D, F]");
  check_projection(kGmm, {"rhs", "rhs_bias", "rhs_a", "rhs_b"}, rhs, "lhs", a.lhs, "[L, D, F]",
                   {rhs.count(), "L of rhs"}, {a.lhs.size(1), "D of lhs"}, {rhs.out_size(), "F of rhs"});
}

void check_gmm(const GmmArguments& a) {
  check_gmm_shapes(a);
  check_group_sizes(kGmm, a.group_sizes, a.lhs.size(0), Sum::at_most);
}

Tensor multiply_grouped(const GmmArguments& a, const Tensor& reduced) {
  const int64_t count = a.rhs.count();
  // Beyond these bounds no group is local. Clamping keeps sums with group_offset from overflowing.
  const int64_t offset = std::clamp(a.group_offset, -count, a.group_sizes.size(0));
  if (uses_kernels(a.lhs)) return multiply_kernel(a, offset, reduced);
  const RowGroups groups = row_groups(a.group_sizes, offset, count);
  const Tensor out = multiply_aten(a.lhs, a.rhs.weights(), a.rhs.bias, groups);
  return a.rhs.has_factors() ? out.add_(multiply_aten(reduced, {*a.rhs.b}, std::nullopt, groups)) : out;
}

}  // namespace maxmoe::ops
