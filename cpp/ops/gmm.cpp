// gmm is its own transpose: the gradient of lhs is the product with rhs^T and with the factors b^T and a^T in the
// places of a and b, and the gradient of a is computed from the reduced rows of that product. Quantized weights have no
// gradient.
#include "kernels/experts/gmm.h"

#include <ATen/ops/ones.h>

#include <algorithm>

#include "ops/backend.h"
#include "ops/grouped_mm.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/registration.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kGmm = "gmm";

// Checks everything but values of tensors.
void check_gmm_shapes(const GmmArguments& a) {
  const Projection& rhs = a.rhs;
  Argument(kGmm, "lhs", a.lhs).has_dims(2, "[R, D]").is_floating();
  MAXMOE_CHECK(rhs.is_given(), kGmm, "rhs must be given, got None");
  Argument(kGmm, "rhs", *rhs.tensor).has_dims(3, rhs.is_quantized() ? "[L, rows, bytes]" : "[L, D, F]");
  check_projection(kGmm, {"rhs", "rhs_bias", "rhs_a", "rhs_b"}, rhs, "lhs", a.lhs, "[L, D, F]",
                   {rhs.count(), "L of rhs"}, {a.lhs.size(1), "D of lhs"}, {rhs.out_size(), "F of rhs"});
  if (!a.reduced.has_value()) return;
  Argument(kGmm, "reduced", *a.reduced)
      .has_shape("[R, r]", {{a.lhs.size(0), "R of lhs"}, {rhs.rank(), "r of rhs_a"}})
      .has_dtype_of("lhs", a.lhs);
}

Tensor gmm_kernel(const Tensor& lhs, const Projection& rhs, const Tensor& group_sizes, int64_t group_offset,
                  const Tensor& reduced) {
  const Tensor out = empty({lhs.size(0), rhs.out_size()}, lhs.options());
  if (out.numel() == 0) return out;
  const Projection matrices = rhs.in_kernel_layout();
  for_dtype(lhs.scalar_type(), [&]<class T>() {
    maxmoe::gmm(
        Gmm<T>{Operand(lhs), projection_view<T>(matrices), List(group_sizes), group_sizes.numel(), group_offset,
               &kernel_gemm<T>(), view<T>(out), reduced.defined() ? const_view<T>(reduced) : ConstMatrixView<T>{}},
        torch_executor());
  });
  return out;
}

// Through a CUDA kernel or ATen. Rows of no group are zero, as with the CPU kernel.
Tensor gmm_device(const Tensor& lhs, const Projection& rhs, const RowGroups& groups, const Tensor& reduced) {
  Tensor out = multiply_rows(lhs, rhs, groups);
  if (reduced.defined()) out.add_(multiply_rows(reduced, {*rhs.b}, groups));
  return runs_gmm_kernel(lhs, rhs, groups) ? out : out.masked_fill_(groups.rows_of_no_group(lhs.size(0)), 0);
}

template <class... Types>
Tensor gmm_backend(Types... arguments) {
  const GmmArguments a{arguments...};
  check_gmm_shapes(a);
  check_group_sizes(kGmm, a.group_sizes, a.lhs.size(0), Sum::at_most);
  // Beyond these bounds no group is local. Clamping keeps sums with group_offset from overflowing.
  const int64_t offset = std::clamp(a.group_offset, -a.rhs.count(), a.group_sizes.size(0));
  const auto multiply = [&](const Projection& matrices, const Tensor& reduced) {
    if (uses_kernels(a.lhs)) return gmm_kernel(a.lhs, matrices, a.group_sizes, offset, reduced);
    return gmm_device(a.lhs, matrices, RowGroups(a.group_sizes, offset, a.rhs.count()), reduced);
  };
  if (!a.rhs.has_factors()) return multiply(a.rhs, Tensor());
  return multiply(a.rhs, a.reduced.has_value() ? a.reduced->contiguous() : multiply({*a.rhs.a}, Tensor()));
}

// `inputs` are the arguments that may have a gradient: lhs, and the tensor, bias, a and b of rhs.
class GmmNode : public torch::autograd::Function<GmmNode> {
 public:
  static Tensor forward(AutogradContext* ctx, const GmmArguments& a, const auto&... /*inputs*/) {
    GmmArguments kept = a;
    const bool has_factors = a.rhs.has_factors();
    // The gradient of each factor needs the other factor, and the gradient of b the reduced rows.
    if (has_factors && !a.reduced.has_value()) kept.reduced = gmm(a.lhs, {*a.rhs.a}, a.group_sizes, a.group_offset);
    const Tensor out = gmm(a.lhs, a.rhs, a.group_sizes, a.group_offset, kept.reduced);  // checks the arguments
    if (!a.rhs.tensor->requires_grad() && !has_factors) kept.lhs = without_columns(a.lhs);
    if (!a.lhs.requires_grad() && !has_factors) kept.rhs.tensor = without_columns(*a.rhs.tensor);
    save_arguments(ctx, GmmArguments::fields(kept));
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    GmmArguments a;
    load_arguments(ctx, GmmArguments::fields(a));
    const Tensor& grad = grads[0];
    const auto inputs = std::tuple_cat(std::tie(a.lhs), Projection::differentiable(a.rhs));
    const auto [wants_lhs, wants_matrices, wants_bias, wants_a, wants_b] = wanted_gradients(ctx, inputs);
    const auto multiply = [&](const Projection& matrices, const OptionalTensor& reduced) {
      return gmm(grad, matrices.transposed(), a.group_sizes, a.group_offset, reduced);
    };
    const auto multiply_groups = [&](const Tensor& lhs, const Tensor& rhs) {
      return tgmm(lhs, rhs, a.group_sizes, a.rhs.tensor->size(0), a.group_offset);
    };
    OptionalTensor grad_reduced;
    if (a.rhs.has_factors() && (wants_lhs || wants_a)) grad_reduced = multiply({*a.rhs.b}, std::nullopt);
    variable_list result(6);  // for `a` of apply, and the inputs
    if (wants_lhs) result[1] = multiply(a.rhs, grad_reduced);
    if (wants_matrices) result[2] = multiply_groups(a.lhs, grad);
    if (wants_bias) {  // the sum of the rows of each group, as a product with a column of ones
      result[3] = multiply_groups(at::ones_symint({grad.sym_size(0), 1}, grad.options()), grad).squeeze(1);
    }
    if (wants_a) result[4] = multiply_groups(a.lhs, *grad_reduced);
    if (wants_b) {  // which is differentiable if the reduced rows are computed again
      const bool is_kept = !is_transformed(grad);
      result[5] = multiply_groups(is_kept ? *a.reduced : gmm(a.lhs, {*a.rhs.a}, a.group_sizes, a.group_offset), grad);
    }
    return result;
  }
};

struct GmmGradient {
  static Tensor apply(const auto&... arguments) {
    const GmmArguments a{arguments...};
    check_is_frozen(kGmm, "rhs", a.rhs);
    return GmmNode::apply(a, a.lhs, a.rhs.tensor, a.rhs.bias, a.rhs.a, a.rhs.b);
  }

  // The operator is not linear in lhs and rhs, but each of its terms is: the bias as a product with a column of ones.
  static Tensor with_tangents(const auto&... arguments) {
    const GmmArguments a{arguments...};
    check_is_frozen(kGmm, "rhs", a.rhs);
    check_gmm_shapes(a);
    const auto multiply = [&](const Tensor& lhs, const Tensor& matrices) {
      return gmm(lhs, {matrices}, a.group_sizes, a.group_offset);
    };
    const auto product = [&](const Tensor& lhs, const Tensor& matrices) {
      return has_tangent(lhs) || has_tangent(matrices) ? product_rule(multiply, lhs, matrices)
                                                       : multiply(lhs, matrices);
    };
    Tensor out = product(a.lhs, a.rhs.dequantized(a.lhs.scalar_type()));
    if (a.rhs.bias.has_value()) {
      out = out.add(product(at::ones({a.lhs.size(0), 1}, a.lhs.options()), a.rhs.bias->unsqueeze(1)));
    }
    return a.rhs.has_factors() ? out.add(product(product(a.lhs, *a.rhs.a), *a.rhs.b)) : out;
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<gmm_operator, gmm_backend, GmmGradient, Autocast::lower_precision>(
      library, "gmm(Tensor lhs, Tensor group_sizes, *, " + Projection::schema("rhs") +
                   ", int group_offset=0, Tensor? reduced=None) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
