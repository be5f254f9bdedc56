// Gradients and tangents of the operators. maxmoe/ops/__init__.py says how operators behave under torch's transforms.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <torch/csrc/autograd/custom_function.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "ops/checks.h"
#include "ops/operator.h"
#include "ops/torch_internals.h"

namespace maxmoe::ops {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The next functions take any argument of an operator: a tensor, an optional tensor, a number or a string.

// Null for None and for an argument that is not a tensor.
template <class T>
const at::Tensor* tensor_or_null(const T& argument) {
  if constexpr (std::is_same_v<T, at::Tensor>) {
    return argument.defined() ? &argument : nullptr;
  } else if constexpr (std::is_same_v<T, std::optional<at::Tensor>>) {
    return argument.has_value() ? tensor_or_null(*argument) : nullptr;
  } else {
    return nullptr;
  }
}

template <class T>
bool requires_grad(const T& argument) {
  const at::Tensor* tensor = tensor_or_null(argument);
  return tensor != nullptr && tensor->requires_grad();
}

// The tangent of forward-mode AD, undefined if the argument has none.
template <class T>
at::Tensor tangent(const T& argument) {
  const at::Tensor* tensor = tensor_or_null(argument);
  return tensor != nullptr ? torch_internals::tangent(*tensor) : at::Tensor();
}

template <class T>
bool has_tangent(const T& argument) {
  return tangent(argument).defined();
}

// The argument without its tangent.
template <class T>
T primal(const T& argument) {
  if constexpr (is_tensor<T>) {
    if (has_tangent(argument)) return torch_internals::primal(*tensor_or_null(argument));
  }
  return argument;
}

// Autograd. torch::autograd::Function finds the tensors among its own parameters, and its context saves tensors apart
// from other values.

// Saves the arguments of an operator in an autograd context, whatever their number: tensors after `kept`, all other
// values as one tuple, which also owns the strings.
template <class Arguments>
void save_arguments(AutogradContext* ctx, const Arguments& arguments, variable_list kept = {}) {
  constexpr size_t kNumFields = std::tuple_size_v<Arguments>;
  std::vector<c10::IValue> values;
  values.reserve(kNumFields);
  kept.reserve(kept.size() + kNumFields);
  const auto save = [&]<class Field>(const Field& field) {
    if constexpr (is_tensor<Field>) {
      const at::Tensor* given = tensor_or_null(field);
      kept.push_back(given != nullptr ? *given : at::Tensor());
    } else if constexpr (std::is_same_v<Field, std::string_view>) {
      values.emplace_back(std::string(field));
    } else if constexpr (std::is_same_v<Field, std::optional<std::string_view>>) {
      values.push_back(field.has_value() ? c10::IValue(std::string(*field)) : c10::IValue());
    } else {
      values.emplace_back(field);
    }
  };
  std::apply([&](const auto&... fields) { (save(fields), ...); }, arguments);
  ctx->save_for_backward(std::move(kept));
  ctx->saved_data["values"] = c10::ivalue::Tuple::create(std::move(values));
}

// Reads them back; returns the tensors of `kept`. Strings live as long as the context. Hooks
// (torch.autograd.graph.saved_tensors_hooks) may have replaced the tensors, so that the operators of backward passes
// check their arguments again; values on the CPU alone (OperatorCall).
template <class... T>
variable_list load_arguments(AutogradContext* ctx, const std::tuple<T&...>& arguments) {
  variable_list saved = ctx->get_saved_variables();
  auto next_tensor = saved.end() - (is_tensor<T> + ...);
  auto next_value = ctx->saved_data["values"].toTupleRef().elements().begin();
  const auto load = [&]<class Field>(Field& field) {
    if constexpr (is_tensor<Field>) {
      if (next_tensor->defined()) field = *next_tensor;
      ++next_tensor;
    } else {
      field = (next_value++)->template to<Field>();
    }
  };
  std::apply([&](auto&... fields) { (load(fields), ...); }, arguments);
  saved.resize(saved.size() - (is_tensor<T> + ...));
  return saved;
}

// Which gradients of the arguments of a node are wanted, by position: false for an argument that is not a tensor. A
// backward pass computes the gradients for which ctx->needs_input_grad(i) is true, where i counts the tensors that were
// given. requires_grad in the forward pass is not enough: torch.autograd.grad(loss, [x]) asks for no gradient of a
// weight, and a split backward pass (zero bubble schedules of torch.distributed.pipelining) runs a node twice, first
// for its input and then for its weights.
template <class... T>
std::array<bool, sizeof...(T)> wanted_gradients(const AutogradContext* ctx, const std::tuple<T&...>& arguments) {
  size_t num_given = 0;
  const auto is_wanted = [&](const auto& argument) {
    return tensor_or_null(argument) != nullptr && ctx->needs_input_grad(num_given++);
  };
  // Braces, unlike parentheses, fix the order of the calls.
  return std::apply([&](const auto&... field) { return std::array<bool, sizeof...(T)>{is_wanted(field)...}; },
                    arguments);
}

// Saved in the place of a tensor that no gradient needs: an empty tensor with its number of rows and its dtype.
inline at::Tensor without_columns(const at::Tensor& tensor) {
  return at::empty_symint({tensor.sym_size(0), 0}, tensor.options());
}

using WantedGradients = std::span<const bool>;

// The gradient of an operator that is a product of its tensors, and whose backward pass consists of operators:
// backward(wanted, grad, arguments...) returns the gradients in the order of the arguments; the last ones may be
// missing.
//
// The gradient of a factor needs the other factors. Arguments from `num_factors` on are added to the product: their
// gradients need no factor. Optional tensors (weights, biases) are small and always saved.
template <const auto& op, auto backward_function, size_t num_factors = SIZE_MAX>
class Recorded : public torch::autograd::Function<Recorded<op, backward_function, num_factors>> {
 public:
  static at::Tensor forward(AutogradContext* ctx, const auto&... arguments) {
    const at::Tensor out = op(arguments...);  // checks the arguments
    size_t position = 0, num_trained = 0;
    ((num_trained += size_t{position++ < num_factors && requires_grad(arguments)}), ...);
    const auto saved = [&]<class T>(const T& argument) {
      if constexpr (std::is_same_v<T, at::Tensor>) {
        const bool is_needed = !argument.is_floating_point() || num_trained > size_t{argument.requires_grad()};
        if (!is_needed) return without_columns(argument);
      }
      return argument;
    };
    save_arguments(ctx, std::tuple(saved(arguments)...));
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    typename std::remove_cvref_t<decltype(op)>::Arguments arguments;
    const auto fields = std::apply([](auto&... field) { return std::tie(field...); }, arguments);
    load_arguments(ctx, fields);
    const auto wanted = wanted_gradients(ctx, fields);
    variable_list gradients =
        std::apply([&](const auto&... field) { return backward_function(wanted, grads[0], field...); }, arguments);
    gradients.resize(wanted.size());
    return gradients;
  }
};

// The gradient of weights, in their shape and dtype. ragged_dot returns it as a list in the accumulator's type.
inline at::Tensor like_weights(const at::Tensor& products, const at::Tensor& weights) {
  return products.view_as(weights).to(weights.scalar_type());
}

// Forward-mode AD of an operator that is linear in each of its tensors: the tangent of the result is a sum of calls,
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

  // The result is computed from the arguments and not from the primals, because a backward pass needs the tangents of
  // the saved tensors (forward over reverse).
  const at::Tensor out = [&] {
    const torch_internals::NoTangents no_tangents;
    return op(args...);
  }();
  return torch_internals::make_dual(out, sum);
}

// Raises inside of torch.func.grad, vjp and jacrev, which do not work with torch::autograd::Function.
inline void check_no_function_transform(const char* op) {
  TORCH_CHECK_NOT_IMPLEMENTED(torch_internals::supports_autograd_function(), "maxmoe::", op,
                              ": gradients must be taken with torch.autograd, or in forward mode with torch.func.jvp "
                              "and jacfwd, got torch.func.grad, vjp, jacrev or another transform in reverse mode");
}

// Whether the backward pass is differentiated in turn (create_graph, forward-mode AD) or gets a batch of gradients
// (is_grads_batched). Then it must consist of differentiable operators: a kernel has no gradient and no batching rule.
inline bool is_transformed(const at::Tensor& grad) {
  return at::GradMode::is_enabled() || has_tangent(grad) || torch_internals::is_batched(grad);
}

}  // namespace maxmoe::ops
