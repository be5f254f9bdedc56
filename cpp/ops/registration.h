// Registers the operators of torch.ops.maxmoe: their kernels, gradients and rules of autocast.
//
//     define<tgmm, tgmm_backend, Recorded<tgmm, tgmm_backward>, Autocast::lower_precision>(library, "tgmm(...)");
#pragma once

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

#include <string>
#include <utility>
#include <vector>

#include "ops/autograd.h"
#include "ops/operator.h"

namespace maxmoe::ops {

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

inline c10::OperatorHandle handle(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(std::string("maxmoe::").append(name).c_str(), "");
}

// Stores the function that call_of returns.
void add_call(const char* name, AnyFunction call);

// The functions of one operator: `call` goes to the dispatcher, and the dispatcher calls the others by dispatch key.
template <class Op>
class Registration;

template <Name kName, class Return, class... Args>
class Registration<Operator<kName, Return(Args...)>> {
  using Op = Operator<kName, Return(Args...)>;
  static constexpr const char* name = Op::name;

 public:
  using Kernel = Return (*)(Concrete<Args>...);

  template <Kernel kernel, class Gradient, Autocast rule>
  static void define(torch::Library& library, const std::string& schema) {
    library.def(schema.c_str());
    add_call();
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

  static void add_call() { ops::add_call(name, reinterpret_cast<AnyFunction>(&call)); }

 private:
  static Return call(Args... args) {
    static const auto typed = handle(name).template typed<Return(Args...)>();
    return typed.call(std::forward<Args>(args)...);
  }

  static void check(const Args&... args) {
    static const c10::FunctionSchema& schema = handle(name).schema();
    check_tensors(schema, {tensor_or_null(args)...});
  }

  template <Kernel kernel>
  static Return backend(Args... args) {
    check(args...);
    const OperatorCall running;
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
    return call(std::forward<Args>(args)...);
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
    return call(std::forward<Args>(args)...);
  }

  template <class Gradient>
  static Return with_tangents(const Args&... args) {
    if constexpr (requires { Gradient::with_tangents(args...); }) {
      return Gradient::with_tangents(args...);
    } else {
      return product_rule(Op(), args...);
    }
  }

  template <c10::DeviceType device>
  static Return autocast(Args... args) {
    const torch_internals::NoAutocast no_autocast;  // otherwise the call below would come back here
    static const std::vector<bool> keeps_dtype = [] {
      std::vector<bool> keeps;
      for (const c10::Argument& argument : handle(name).schema().arguments()) {
        keeps.push_back(argument.name() == "weights" || argument.name().ends_with("_scales"));
      }
      return keeps;
    }();
    return [&]<size_t... position>(std::index_sequence<position...>) {
      return call((keeps_dtype[position] ? args : torch_internals::cast_for_autocast<device>(args))...);
    }(std::make_index_sequence<sizeof...(Args)>());
  }
};

template <const auto& op>
using RegistrationOf = Registration<std::remove_cvref_t<decltype(op)>>;

// kernel: called on all devices, with dense tensors of one device.
// Gradient: apply(args...) records the operator, as a torch::autograd::Function does. with_tangents(args...) returns
// the results with their tangents; an operator that is linear in each of its tensors does not need it.
template <const auto& op, typename RegistrationOf<op>::Kernel kernel, class Gradient = NotDifferentiable,
          Autocast rule = Autocast::none>
void define(torch::Library& library, const std::string& schema) {
  RegistrationOf<op>::template define<kernel, Gradient, rule>(library, schema);
}

// An operator without a kernel: a function that calls operators, each of which torch dispatches.
template <const auto& op>
void define_composite(torch::Library& library, const std::string& schema, auto* function) {
  library.def(schema.c_str(), function);
  RegistrationOf<op>::add_call();
}

}  // namespace maxmoe::ops
