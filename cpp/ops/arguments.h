// Questions to any argument of an operator. What is no tensor, or None, has neither gradient nor tangent.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <type_traits>

namespace maxmoe::ops {

template <class T>
constexpr bool is_tensor = std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>>;

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

// The tangent of forward-mode AD, undefined where there is none.
template <class T>
at::Tensor tangent(const T& argument) {
  const at::Tensor* tensor = tensor_or_null(argument);
  return tensor != nullptr ? tensor->_fw_grad(/*level=*/0) : at::Tensor();
}

template <class T>
bool has_tangent(const T& argument) {
  return tangent(argument).defined();
}

// The argument without its tangent.
template <class T>
T primal(const T& argument) {
  if constexpr (is_tensor<T>) {
    if (has_tangent(argument)) return tensor_or_null(argument)->_fw_primal(/*level=*/0);
  }
  return argument;
}

// Sizes that torch.compile may trace as symbols are numbers where a kernel runs.
template <class T>
auto concrete(const T& argument) {
  if constexpr (std::is_same_v<T, c10::SymInt>) {
    return argument.guard_int(__FILE__, __LINE__);
  } else if constexpr (std::is_same_v<T, std::optional<c10::SymInt>>) {
    return argument.has_value() ? std::optional(concrete(*argument)) : std::nullopt;
  } else {
    return argument;
  }
}

// The type of a kernel's parameter for an operator's parameter of type T.
template <class T>
using Concrete = std::conditional_t<std::is_reference_v<T>, T, decltype(concrete(std::declval<T>()))>;

}  // namespace maxmoe::ops
