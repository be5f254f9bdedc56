// What the gradients of the operators share. maxmoe/ops/__init__.py says how operators behave under torch's transforms.
#pragma once

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_make_dual.h>
#include <torch/csrc/autograd/custom_function.h>

#include <algorithm>
#include <array>
#include <tuple>
#include <utility>

#include "ops/arguments.h"

namespace maxmoe::ops {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

inline at::Tensor defined_or_empty(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

inline std::optional<at::Tensor> optional_tensor(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

// The tensors that forward saved, in the same order.
template <size_t count>
std::array<at::Tensor, count> saved_tensors(const AutogradContext* ctx) {
  const variable_list saved = ctx->get_saved_variables();
  TORCH_INTERNAL_ASSERT(saved.size() == count);
  std::array<at::Tensor, count> tensors;
  std::copy_n(saved.begin(), count, tensors.begin());
  return tensors;
}

// The gradient of weights, from the products of ragged_dot: in their shape and dtype.
inline at::Tensor like_weights(const at::Tensor& products, const at::Tensor& weights) {
  return products.view_as(weights).to(weights.scalar_type());
}

// An operator that is linear in each of its tensors, in forward-mode AD: the tangent of the result is a sum of calls,
// each with one argument replaced by its tangent.
template <class Op, class... Args>
at::Tensor product_rule(const Op& op, const Args&... args) {
  const std::tuple<Args...> primals(primal(args)...);
  at::Tensor sum;
  const auto add_term = [&]<size_t position, class T>(std::integral_constant<size_t, position>, const T& argument) {
    if constexpr (is_tensor<T>) {
      if (!has_tangent(argument)) return;
      auto arguments = primals;
      std::get<position>(arguments) = tangent(argument);
      const at::Tensor term = std::apply(op, arguments);
      sum = sum.defined() ? sum.add(term) : term;
    }
  };
  [&]<size_t... position>(std::index_sequence<position...>) {
    (add_term(std::integral_constant<size_t, position>(), args), ...);
  }(std::index_sequence_for<Args...>());

  // Of the arguments themselves, not of the primals: a backward pass finds their tangents among the saved tensors.
  const c10::AutoFwGradMode no_tangents(false);
  const at::Tensor out = op(args...);
  const c10::AutoFwGradMode with_tangents(true);
  return at::_make_dual(out, sum, /*level=*/0);
}

// Throws inside of torch.func.grad, vjp and jacrev, where torch::autograd::Function does not work.
void check_no_function_transform(const char* op);

// Whether a backward pass is differentiated in turn (create_graph, forward-mode AD) or gets a batch of gradients
// (is_grads_batched): then it must be made of differentiable operators instead of one kernel.
bool is_transformed(const at::Tensor& grad);

}  // namespace maxmoe::ops
