// One matrix of each expert as arguments of an operator: weights, bias and low-rank factors.
//
// In a schema, a projection `up` is the arguments up, up_bias, up_a, up_b, up_scales, ...: one list here says which.
#pragma once

#include <string>
#include <string_view>
#include <tuple>

#include "kernels/product/projection.h"
#include "ops/weights.h"

namespace maxmoe::ops {

// A row x of expert g becomes x (W[g] + a[g] b[g]) + bias[g]. maxmoe/ops/_projection.py has the same fields.
struct Projection {
  OptionalTensor tensor = {};  // W [L, in, out], or the codes of quantized weights; none without a matrix
  OptionalTensor bias = {};    // [L, out]
  OptionalTensor a = {};       // [L, in, r]
  OptionalTensor b = {};       // [L, r, out], with the scale of the factors
  OptionalTensor scales = {};  // this and the rest describe quantized weights
  OptionalTensor zeros = {};
  std::optional<std::string_view> format = {};
  int64_t columns = 0;
  bool is_transposed = false;

  // The arguments of a schema.
  static std::string schema(const std::string& name);
  // All fields, in the order of the schema.
  template <class Self>
  static auto fields(Self& p) {
    return std::tie(p.tensor, p.bias, p.a, p.b, p.scales, p.zeros, p.format, p.columns, p.is_transposed);
  }
  // The tensors that may have a gradient.
  auto differentiable() const { return std::tie(tensor, bias, a, b); }

  bool is_given() const { return tensor.has_value(); }
  bool has_factors() const { return a.has_value(); }
  int64_t rank() const { return has_factors() ? a->size(2) : 0; }
  Weights weights() const { return {*tensor, scales, zeros, format, columns, is_transposed}; }
  int64_t count() const { return tensor->size(0); }
  int64_t out_size() const {
    if (!format.has_value()) return tensor->size(2);
    return is_transposed ? tensor->size(1) : columns;
  }
  // W^T + b^T a^T, without a bias: it multiplies gradients.
  Projection transposed() const;
  // The projection in a layout that kernels read. It owns the memory of a view of it.
  Projection in_kernel_layout() const;
};

// Parameters of C++ functions: `Signature<Return, Types<A...>, Types<B...>>` is Return(A..., B...).
template <class... T>
struct Types {};

template <class Return, class... Lists>
struct Joined;
template <class Return, class... T>
struct Joined<Return, Types<T...>> {
  using Function = Return(T...);
};
template <class Return, class... T, class... U, class... Rest>
struct Joined<Return, Types<T...>, Types<U...>, Rest...> : Joined<Return, Types<T..., U...>, Rest...> {};

template <class Return, class... Lists>
using Signature = typename Joined<Return, Lists...>::Function;

// The parameters of an operator for the fields of a projection.
using ProjectionTypes =
    Types<const OptionalTensor&, const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
          const OptionalTensor&, const OptionalTensor&, std::optional<std::string_view>, int64_t, bool>;

// A size that an argument must have, and what it is.
struct Size {
  int64_t size;
  const char* meaning;
};

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

// Checks that nothing of a projection is given.
void check_no_projection(const char* op, const ProjectionNames& names, const Projection& p);

// A view of a projection that in_kernel_layout returned. Factors without columns add nothing.
template <class T>
maxmoe::Projection<T> projection_view(const Projection& p) {
  maxmoe::Projection<T> view;
  if (p.is_given()) view.weights = weight_view<T>(p.weights());
  if (p.bias.has_value()) view.bias = const_view<T>(*p.bias);
  if (p.rank() > 0) view.factors = {const_stack<T>(*p.a), const_stack<T>(*p.b)};
  return view;
}

}  // namespace maxmoe::ops
