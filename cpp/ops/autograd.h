// What the operators' autograd functions and autocast rules share.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/library.h>

#include <optional>

namespace maxmoe::ops {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The operator as a typed function through the dispatcher.
template <class Signature>
c10::TypedOperatorHandle<Signature> find_operator(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// Whether the autograd function is needed at all.
template <class... Tensors>
bool needs_gradient(const Tensors&... tensors) {
  return at::GradMode::is_enabled() && (tensors.requires_grad() || ...);
}

inline at::Tensor defined_or_empty(const std::optional<at::Tensor>& tensor) {
  return tensor.value_or(at::Tensor());
}

inline std::optional<at::Tensor> optional_tensor(const at::Tensor& tensor) {
  return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
}

inline bool requires_grad(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() && tensor->defined() && tensor->requires_grad();
}

// The autocast rules: in the autocast dtype of the device, or in float32.
inline at::Tensor autocast(const at::Tensor& tensor, c10::DeviceType device) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), tensor, device);
}
inline std::optional<at::Tensor> autocast(const std::optional<at::Tensor>& tensor, c10::DeviceType device) {
  return tensor.has_value() ? std::optional<at::Tensor>(autocast(*tensor, device)) : std::nullopt;
}

}  // namespace maxmoe::ops
