// An operator of torch.ops.maxmoe in C++: how it is called, and what all of them register in the same way.
//
// The header of an operator declares it, its source file registers it:
//
//     inline constexpr Operator<"gmm", Tensor(const Tensor& lhs, const Tensor& rhs)> gmm;
//     gmm.define<gmm_backend, Gradient, Autocast::lower_precision>(library, "gmm(Tensor lhs, Tensor rhs) -> Tensor");
//
// and gmm(lhs, rhs) is a call through the dispatcher.
#pragma once

#include <ATen/autocast_mode.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <algorithm>
#include <string>
#include <utility>

#include "ops/autograd.h"
#include "ops/checks.h"

namespace maxmoe::ops {

// A string as template argument.
template <size_t size>
struct Name {
  constexpr Name(const char (&characters)[size]) { std::copy_n(characters, size, text); }
  char text[size]{};
};

// The gradient of operators that have none: backward through their results is an error.
struct NotDifferentiable {};

// lower_precision: floating tensors take the dtype of autocast, all but `weights`, which multiply in float32.
enum class Autocast { none, lower_precision };

template <Name name, class Signature>
class Operator;

template <Name name, class Return, class... Args>
class Operator<name, Return(Args...)> {
 public:
  Return operator()(Args... args) const {
    static const auto typed = handle().template typed<Return(Args...)>();
    return typed.call(std::forward<Args>(args)...);
  }

  // kernel: for all devices; sees dense tensors of one device.
  // Gradient: a class with apply(args...), such as a torch::autograd::Function; and with with_tangents(args...), the
  // results and their tangents in forward-mode AD, unless the operator is linear in each of its tensors.
  template <Return (*kernel)(Concrete<Args>...), class Gradient = NotDifferentiable, Autocast rule = Autocast::none>
  void define(torch::Library& library, const std::string& schema) const {
    library.def(schema.c_str());
    library.impl(name.text, c10::DispatchKey::CompositeExplicitAutograd, &backend<kernel>);
    if constexpr (std::is_same_v<Gradient, NotDifferentiable>) {
      library.impl(name.text, c10::DispatchKey::Autograd, torch::autograd::autogradNotImplementedFallback());
    } else {
      library.impl(name.text, c10::DispatchKey::Autograd, &autograd<Gradient>);
    }
    if constexpr (rule == Autocast::lower_precision) {
      library.impl(name.text, c10::DispatchKey::AutocastCPU, &autocast<c10::kCPU>);
      library.impl(name.text, c10::DispatchKey::AutocastCUDA, &autocast<c10::kCUDA>);
    }
  }

 private:
  static c10::OperatorHandle handle() {
    return c10::Dispatcher::singleton().findSchemaOrThrow((std::string("maxmoe::") + name.text).c_str(), "");
  }

  static void check(const Args&... args) {
    static const c10::FunctionSchema& schema = handle().schema();
    check_tensors(schema, {tensor_or_null(args)...});
  }

  template <Return (*kernel)(Concrete<Args>...)>
  static Return backend(Args... args) {
    check(args...);
    const OperatorCall call;
    // The kernels on ATen call operators that have autocast rules of their own.
    const c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    return kernel(concrete(args)...);
  }

  template <class Gradient>
  static Return autograd(Args... args) {
    check(args...);
    if ((has_tangent(args) || ...)) return with_tangents<Gradient>(args...);
    const bool is_recorded = at::GradMode::is_enabled() && (requires_grad(args) || ...);
    if (is_recorded) check_no_function_transform(name.text);
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
    const c10::impl::ExcludeDispatchKeyGuard guard(at::autocast::get_autocast_dispatch_key_from_device_type(device));
    static const int weights = handle().schema().argumentIndexWithName("weights").value_or(-1);
    return [&]<int... position>(std::integer_sequence<int, position...>) {
      return Operator()((position == weights ? args : autocast_to<device>(args))...);
    }(std::make_integer_sequence<int, sizeof...(Args)>());
  }

  template <c10::DeviceType device, class T>
  static T autocast_to(const T& argument) {
    return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), argument, device);
  }
};

}  // namespace maxmoe::ops
