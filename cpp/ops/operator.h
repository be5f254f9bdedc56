// An operator of torch.ops.maxmoe in C++: its registration, and its call from other operators.
//
// ops/operators.h declares an operator that others call, its source file registers it:
//
//     inline constexpr Operator<"tgmm", Tensor(const Tensor& lhs, const Tensor& rhs)> tgmm;
//     tgmm.define<tgmm_backend, Recorded<tgmm, tgmm_backward>, Autocast::lower_precision>(library, "tgmm(...)");
//
// A call tgmm(lhs, rhs) goes through the dispatcher of torch, as a call from Python does.
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "ops/autograd.h"

namespace maxmoe::ops {

// A string as template argument.
template <size_t size>
struct Name {
  constexpr Name(const char (&characters)[size]) { std::copy_n(characters, size, text); }
  char text[size]{};
};

// The `Gradient` of an operator without one: backward through its results is an error.
struct NotDifferentiable {};

// The `Gradient` of an operator whose results are constants for autograd.
struct Constant {};

// lower_precision: floating tensors are cast to the dtype of autocast. `weights` and the scales of quantized matrices
// are not: kernels multiply by them in float32, whatever the dtype of the rows.
enum class Autocast { none, lower_precision };

// Sizes that torch.compile may trace as symbols (SymInt) are numbers when a kernel runs. Other arguments are returned
// as they are: to copy the tensors of expert_ffn takes as long as some of its kernels with one token.
template <class T>
decltype(auto) concrete(const T& argument) {
  if constexpr (std::is_same_v<T, c10::SymInt>) {
    return argument.guard_int(__FILE__, __LINE__);
  } else if constexpr (std::is_same_v<T, std::optional<c10::SymInt>>) {
    return argument.has_value() ? std::optional(concrete(*argument)) : std::nullopt;
  } else {
    return (argument);
  }
}

// The type of a kernel's parameter for an operator's parameter of type T.
template <class T>
using Concrete =
    std::conditional_t<std::is_reference_v<T>, T, std::remove_cvref_t<decltype(concrete(std::declval<T>()))>>;

template <Name kName, class Signature>
class Operator;

template <Name kName, class Return, class... Args>
class Operator<kName, Return(Args...)> {
 public:
  static constexpr const char* name = kName.text;
  using Arguments = std::tuple<std::decay_t<Args>...>;

  Return operator()(Args... args) const {
    // Once per operator, because the lookup hashes the name.
    static const auto typed = handle().template typed<Return(Args...)>();
    return typed.call(std::forward<Args>(args)...);
  }

  // kernel: called on all devices, with dense tensors of one device.
  // Gradient: apply(args...) records the operator, as a torch::autograd::Function does. with_tangents(args...) returns
  // the results with their tangents; an operator that is linear in each of its tensors does not need it.
  template <Return (*kernel)(Concrete<Args>...), class Gradient = NotDifferentiable, Autocast rule = Autocast::none>
  void define(torch::Library& library, const std::string& schema) const {
    library.def(schema.c_str());
    // One function for all devices: it chooses between kernel and ATen itself (uses_kernels). Fake tensors and meta
    // tensors do not come here: maxmoe/ops registers fake kernels for them.
    library.impl(name, c10::DispatchKey::CompositeExplicitAutograd, &backend<kernel>);
    if constexpr (std::is_same_v<Gradient, NotDifferentiable>) {
      library.impl(name, c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback());
    } else if constexpr (std::is_same_v<Gradient, Constant>) {
      library.impl(name, c10::DispatchKey::Autograd, &below_autograd);
    } else {
      library.impl(name, c10::DispatchKey::Autograd, &autograd<Gradient>);
    }
    if constexpr (rule == Autocast::lower_precision) {
      library.impl(name, c10::DispatchKey::AutocastCPU, &autocast<c10::kCPU>);
      library.impl(name, c10::DispatchKey::AutocastCUDA, &autocast<c10::kCUDA>);
    }
  }

 private:
  static c10::OperatorHandle handle() {
    return c10::Dispatcher::singleton().findSchemaOrThrow(std::string("maxmoe::").append(name).c_str(), "");
  }

  static void check(const Args&... args) {
    static const c10::FunctionSchema& schema = handle().schema();
    check_tensors(schema, {tensor_or_null(args)...});
  }

  template <Return (*kernel)(Concrete<Args>...)>
  static Return backend(Args... args) {
    check(args...);
    const OperatorCall call;
    // The device of all tensors, which need not be the current one.
    c10::OptionalDeviceGuard device;
    for (const Tensor* tensor : {tensor_or_null(args)...}) {
      if (tensor == nullptr) continue;
      device.reset_device(tensor->device());
      break;
    }
    // On other devices a kernel calls operators of ATen that have autocast rules, too: they would change the dtype of
    // intermediate results.
    const torch_internals::NoAutocast no_autocast;
    return kernel(concrete(args)...);
  }

  static Return below_autograd(Args... args) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    return Operator()(std::forward<Args>(args)...);
  }

  template <class Gradient>
  static Return autograd(Args... args) {
    const bool has_tangents = (has_tangent(args) || ...);
    const bool is_recorded = at::GradMode::is_enabled() && (requires_grad(args) || ...);
    if (has_tangents || is_recorded) check(args...);  // first: the gradients read the shapes of the arguments
    if (has_tangents) return with_tangents<Gradient>(args...);
    if (is_recorded) check_no_function_transform(name);
    // Below, no call is recorded: Gradient::apply has created the only node of the graph.
    const at::AutoDispatchBelowADInplaceOrView guard;
    if (is_recorded) return Gradient::apply(args...);
    return Operator()(std::forward<Args>(args)...);
  }

  template <class Gradient>
  static Return with_tangents(const Args&... args) {
    if constexpr (requires { Gradient::with_tangents(args...); }) {
      return Gradient::with_tangents(args...);
    } else {
      return product_rule(Operator(), args...);
    }
  }

  template <c10::DeviceType device>
  static Return autocast(Args... args) {
    const torch_internals::NoAutocast no_autocast;  // otherwise the call below would come back here
    static const std::vector<bool> keeps_dtype = [] {
      std::vector<bool> keeps;
      for (const c10::Argument& argument : handle().schema().arguments()) {
        keeps.push_back(argument.name() == "weights" || argument.name().ends_with("_scales"));
      }
      return keeps;
    }();
    return [&]<size_t... position>(std::index_sequence<position...>) {
      return Operator()((keeps_dtype[position] ? args : torch_internals::cast_for_autocast<device>(args))...);
    }(std::make_index_sequence<sizeof...(Args)>());
  }
};

}  // namespace maxmoe::ops
