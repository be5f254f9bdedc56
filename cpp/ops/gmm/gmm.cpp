// gmm returns the product and the reduced rows of low-rank factors, which backward needs: [R, 0] without factors.
//
// It is its own transpose: the gradient of lhs is the product with rhs^T and with the factors b^T and a^T in the places
// of a and b, and the rows reduced on the way are what the gradient of a needs. Quantized weights have no gradient.
#include "ops/gmm/gmm.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

namespace maxmoe::ops {
namespace {

using Outputs = std::tuple<Tensor, Tensor>;

template <class... Arguments>
Outputs gmm_backend(Arguments... arguments) {
  const GmmArguments a{arguments...};
  check_gmm(a);
  const Tensor reduced = a.rhs.has_factors()
                             ? multiply_grouped({a.lhs, a.group_sizes, {*a.rhs.a}, a.group_offset}, Tensor())
                             : at::empty({a.lhs.size(0), 0}, a.lhs.options());
  return {multiply_grouped(a, reduced), reduced};
}

// The gradient of a bias: the sum of the rows of each group, as a product with a column of ones.
Tensor gradient_of_bias(const Tensor& grad, const Tensor& group_sizes, int64_t num_local_groups, int64_t group_offset) {
  const Tensor ones = at::ones_symint({grad.sym_size(0), 1}, grad.options());
  return tgmm(ones, grad, group_sizes, num_local_groups, group_offset).squeeze(1);
}

// `inputs` are the arguments that may have a gradient: lhs, and the tensor, bias, a and b of rhs.
class GmmNode : public torch::autograd::Function<GmmNode> {
 public:
  static variable_list forward(AutogradContext* ctx, const GmmArguments& a, const auto&... /*inputs*/) {
    const auto [out, reduced] = gmm_and_reduced(a.lhs, a.rhs, a.group_sizes, a.group_offset);
    // The gradient of each factor needs the other one.
    GmmArguments kept = a;
    kept.rhs.bias = std::nullopt;
    if (!a.rhs.tensor->requires_grad() && !a.rhs.has_factors()) kept.lhs = Tensor();
    if (!a.lhs.requires_grad() && !a.rhs.has_factors()) kept.rhs.tensor = kept.rhs.scales = kept.rhs.zeros = Tensor();
    save_arguments(ctx, GmmArguments::fields(kept), {a.rhs.has_factors() ? reduced : Tensor()});
    ctx->saved_data["has_bias"] = a.rhs.bias.has_value();
    ctx->saved_data["num_local_groups"] = a.rhs.count();
    ctx->set_materialize_grads(false);
    return {out, reduced};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    GmmArguments a;
    const Tensor reduced = load_arguments(ctx, GmmArguments::fields(a))[0];
    const Tensor& grad = grads[0];
    const bool has_bias = ctx->saved_data["has_bias"].toBool();
    const int64_t num_local_groups = ctx->saved_data["num_local_groups"].toInt();
    const auto is_wanted = [&](size_t input) { return ctx->needs_input_grad(input); };
    const size_t first_factor = has_bias ? 3 : 2;
    const bool wants_a = a.rhs.has_factors() && is_wanted(first_factor);
    // The gradient of the second output is defined in second derivatives alone.
    const auto [grad_lhs, grad_reduced] = grads[1].defined() && a.rhs.has_factors()
                                              ? gradients_of_rows(a, grad, grads[1])
                                              : gradients_of_rows(a, grad, is_wanted(0), wants_a);
    const auto multiply_groups = [&](const Tensor& left, const Tensor& right) {
      return tgmm(left, right, a.group_sizes, num_local_groups, a.group_offset);
    };
    variable_list result(6);  // for `a` of apply, and the inputs
    result[1] = grad_lhs;
    if (wants_a && grad_reduced.defined()) result[4] = multiply_groups(a.lhs, grad_reduced);
    if (!grad.defined()) return result;
    if (is_wanted(1)) result[2] = multiply_groups(a.lhs, grad);
    if (has_bias && is_wanted(2)) {
      result[3] = gradient_of_bias(grad, a.group_sizes, num_local_groups, a.group_offset);
    }
    if (a.rhs.has_factors() && is_wanted(first_factor + 1)) result[5] = multiply_groups(reduced, grad);
    return result;
  }

 private:
  static Tensor multiply(const GmmArguments& a, const Tensor& rows, const Projection& matrices) {
    return gmm(rows, matrices.transposed(), a.group_sizes, a.group_offset);
  }

  // The gradients of lhs and of the reduced rows, undefined where they are not needed.
  static std::pair<Tensor, Tensor> gradients_of_rows(const GmmArguments& a, const Tensor& grad, bool wants_lhs,
                                                     bool wants_reduced) {
    if (!grad.defined()) return {};
    if (!wants_lhs) return {Tensor(), wants_reduced ? multiply(a, grad, {*a.rhs.b}) : Tensor()};
    const auto [grad_lhs, grad_reduced] = gmm_and_reduced(grad, a.rhs.transposed(), a.group_sizes, a.group_offset);
    return {grad_lhs, grad_reduced};
  }

  // The same from the gradients of both outputs.
  static std::pair<Tensor, Tensor> gradients_of_rows(const GmmArguments& a, const Tensor& grad,
                                                     const Tensor& grad_of_reduced) {
    const Projection factor{*a.rhs.a};
    if (!grad.defined()) return {multiply(a, grad_of_reduced, factor), grad_of_reduced};
    Projection matrices = a.rhs;
    matrices.a = matrices.b = std::nullopt;
    const Tensor grad_reduced = grad_of_reduced.add(multiply(a, grad, {*a.rhs.b}));
    return {multiply(a, grad_reduced, factor).add(multiply(a, grad, matrices)), grad_reduced};
  }
};

struct GmmGradient {
  static Outputs apply(const auto&... arguments) {
    const GmmArguments a{arguments...};
    check_is_frozen(kGmm, "rhs", a.rhs.scales);
    MAXMOE_CHECK(a.rhs.is_given(), kGmm, "rhs must be given, got None");
    const variable_list results = GmmNode::apply(a, a.lhs, a.rhs.tensor, a.rhs.bias, a.rhs.a, a.rhs.b);
    return {results[0], results[1]};
  }

  // The operator is not linear in lhs and rhs, but each of its terms is: the bias as a product with a column of ones.
  static Outputs with_tangents(const auto&... arguments) {
    const GmmArguments a{arguments...};
    check_is_frozen(kGmm, "rhs", a.rhs.scales);
    check_gmm_shapes(a);
    const auto multiply = [&](const Tensor& lhs, const Tensor& matrices) {
      return gmm(lhs, Projection{matrices}, a.group_sizes, a.group_offset);
    };
    const auto product = [&](const Tensor& lhs, const Tensor& matrices) {
      return has_tangent(lhs) || has_tangent(matrices) ? product_rule(multiply, lhs, matrices)
                                                       : multiply(lhs, matrices);
    };
    Tensor out = product(a.lhs, a.rhs.weights().dequantized(a.lhs.scalar_type()));
    if (a.rhs.bias.has_value()) {
      out = out.add(product(at::ones({a.lhs.size(0), 1}, a.lhs.options()), a.rhs.bias->unsqueeze(1)));
    }
    if (!a.rhs.has_factors()) return {out, at::empty({a.lhs.size(0), 0}, a.lhs.options())};
    const Tensor reduced = product(a.lhs, *a.rhs.a);
    return {out.add(product(reduced, *a.rhs.b)), reduced};
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  gmm_operator.define<gmm_backend, GmmGradient, Autocast::lower_precision>(
      library, "gmm(Tensor lhs, Tensor group_sizes, *, " + Projection::schema("rhs") +
                   ", int group_offset=0) -> (Tensor out, Tensor reduced)");
}

}  // namespace
}  // namespace maxmoe::ops
