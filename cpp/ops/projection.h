// One matrix of each expert as arguments of an operator: weights, bias and low-rank factors.
//
// In a schema, a projection `up` is the arguments up, up_scales, ..., up_bias, up_a, up_b; here is the only list of
// them.
#pragma once

#include <string>
#include <tuple>

#include "kernels/product/projection.h"
#include "ops/operator.h"
#include "ops/weights.h"

namespace maxmoe::ops {

// A row x of expert g becomes x (W[g] + a[g] b[g]) + bias[g]. maxmoe/ops/_projection.py has the same fields.
struct Projection : Weights {
  OptionalTensor bias = {};  // [L, out]
  OptionalTensor a = {};     // [L, in, r]
  OptionalTensor b = {};     // [L, r, out], with the scale of the factors

  // The arguments of a schema.
  static std::string schema(const std::string& name);
  // All fields, in the order of the schema.
  template <class Self>
  static auto fields(Self& p) {
    return std::tie(p.tensor, p.scales, p.zeros, p.row_scales, p.format, p.columns, p.is_transposed, p.bias, p.a, p.b);
  }
  // The tensors that may have a gradient.
  template <class Self>
  static auto differentiable(Self& p) {
    return std::tie(p.tensor, p.bias, p.a, p.b);
  }

  bool has_factors() const { return a.has_value(); }
  int64_t rank() const { return has_factors() ? a->size(2) : 0; }
  // W^T + b^T a^T, without a bias: it multiplies gradients.
  Projection transposed() const;
  // The projection in a layout that kernels read. It owns the memory of a view of it.
  Projection in_kernel_layout() const;
};

// The type of an operator whose parameters are `Before` and the fields of a struct of arguments.
template <class Return, class Fields, class... Before>
struct SignatureOfFields;
template <class Return, class... T, class... Before>
struct SignatureOfFields<Return, std::tuple<T&...>, Before...> {
  using Function = Return(Before..., std::conditional_t<is_tensor<T>, const T&, T>...);
};
template <class Return, class Arguments, class... Before>
using Signature =
    SignatureOfFields<Return, decltype(Arguments::fields(std::declval<Arguments&>())), Before...>::Function;

// The names of the arguments of a projection in messages.
struct ProjectionNames {
  const char* tensor;
  const char* bias;
  const char* a;
  const char* b;
};

// Checks a projection [count, in, out] of rows of x, the argument `x_name`; `shape` is part of messages.
void check_projection(const char* op, const ProjectionNames& names, const Projection& p, const char* x_name,
                      const Tensor& x, const char* shape, Size count, Size in, Size out);

// Checks that no argument of a projection is given.
void check_no_projection(const char* op, const ProjectionNames& names, const Projection& p);

// A view of a projection that in_kernel_layout returned. Factors without columns add nothing.
template <class T>
maxmoe::Projection<T> projection_view(const Projection& p) {
  maxmoe::Projection<T> view;
  if (p.is_given()) view.weights = weight_view<T>(p);
  if (p.bias.has_value()) view.bias = const_view<T>(*p.bias);
  if (p.rank() > 0) view.factors = {const_stack<T>(*p.a), const_stack<T>(*p.b)};
  return view;
}

}  // namespace maxmoe::ops
