// The product of gmm and gmm_low_rank, through the kernel or ATen.
#include <ATen/ops/ones.h>

#include <algorithm>

#include "kernels/experts/gmm.h"
#include "ops/backend.h"
#include "ops/gmm.h"
#include "ops/grouped_mm.h"
#include "ops/memory.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// Rows of no group are zero, as the kernel writes them.
Tensor multiply_aten(const Tensor& lhs, const Weights& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
                     int64_t group_offset) {
  const RowGroups groups = row_groups(group_sizes, group_offset, rhs.count());
  return multiply_rows(lhs, rhs, groups, bias).masked_fill_(groups.rows_of_no_group(lhs.size(0)), 0);
}

Tensor multiply_kernel(const Tensor& lhs, const Weights& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
                       int64_t group_offset, const std::optional<LowRankTerm>& term) {
  const Tensor out = empty({lhs.size(0), rhs.out_size()}, lhs.options());
  if (out.numel() == 0) return out;
  const Tensor left = gemm_operand(lhs);
  const Weights right = rhs.in_kernel_layout();
  const Tensor sizes = group_sizes.contiguous();
  const auto offsets = bias.has_value() ? OptionalTensor(bias->contiguous()) : std::nullopt;
  const bool has_term = term.has_value() && term->reduced.size(1) > 0;
  const Tensor expand = has_term ? gemm_operand(term->expand) : Tensor();
  for_dtype(lhs.scalar_type(), [&]<class T>() {
    Gmm<T> arguments{const_view<T>(left),
                     weight_view<T>(right),
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
int64_t clamped_offset(int64_t group_offset, const Weights& rhs, const Tensor& group_sizes) {
  return std::clamp(group_offset, -rhs.count(), group_sizes.size(0));
}

}  // namespace

void check_gmm(const Tensor& lhs, const Weights& rhs, const Tensor& group_sizes, const OptionalTensor& bias) {
  Argument(kGmm, "lhs", lhs).has_dims(2, "[R, D]").is_floating();
  check_weights(kGmm, "rhs", "[L, D, F]", rhs);
  if (rhs.is_quantized()) {
    MAXMOE_CHECK(rhs.in_size() == lhs.size(1), kGmm, "rhs must have matrices with ", lhs.size(1),
                 " rows (D of lhs), got ", rhs.in_size(), " x ", rhs.out_size());
  } else {
    Argument(kGmm, "rhs", rhs.tensor).has_dtype_of("lhs", lhs).has_size(1, lhs.size(1), "D of lhs");
  }
  if (bias.has_value()) {
    Argument(kGmm, "bias", *bias).has_dims(2, "[L, F]").has_dtype_of("lhs", lhs);
    Argument(kGmm, "bias", *bias).has_size(0, rhs.count(), "L of rhs").has_size(1, rhs.out_size(), "F of rhs");
  }
  check_group_sizes(kGmm, group_sizes, lhs.size(0), Sum::at_most);
}

Tensor multiply_grouped(const Tensor& lhs, const Weights& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
                        int64_t group_offset, const std::optional<LowRankTerm>& term) {
  const int64_t offset = clamped_offset(group_offset, rhs, group_sizes);
  if (uses_kernels(lhs)) return multiply_kernel(lhs, rhs, group_sizes, bias, offset, term);
  const Tensor out = multiply_aten(lhs, rhs, group_sizes, bias, offset);
  if (!term.has_value()) return out;
  return out.add_(multiply_aten(term->reduced, {term->expand}, group_sizes, std::nullopt, offset));
}

Tensor gradient_of_bias(const Tensor& grad, const Tensor& group_sizes, int64_t num_local_groups, int64_t group_offset) {
  const Tensor ones = at::ones_symint({grad.sym_size(0), 1}, grad.options());
  return tgmm(ones, grad, group_sizes, num_local_groups, group_offset).squeeze(1);
}

void save_weights(AutogradContext* ctx, const Weights& rhs) {
  ctx->saved_data["format"] = rhs.is_quantized() ? c10::IValue(std::string(*rhs.format)) : c10::IValue();
  ctx->saved_data["columns"] = rhs.columns;
  ctx->saved_data["is_transposed"] = rhs.is_transposed;
}

Weights load_weights(AutogradContext* ctx, const Tensor& tensor, const Tensor& scales, const Tensor& zeros) {
  return {tensor,
          optional_tensor(scales),
          optional_tensor(zeros),
          ctx->saved_data["format"].toOptional<std::string_view>(),
          ctx->saved_data["columns"].toInt(),
          ctx->saved_data["is_transposed"].toBool()};
}

}  // namespace maxmoe::ops
