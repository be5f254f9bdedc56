// An operator of torch.ops.maxmoe in C++: a typed handle, which other operators and maxmoe._C call.
//
//     inline constexpr Operator<"tgmm", Tensor(const Tensor& lhs, const Tensor& rhs)> tgmm;
//
// A call tgmm(lhs, rhs) goes through the dispatcher of torch, as a call from Python does. ops/operators.h declares the
// operators that others call. The source file of an operator registers it (ops/registration.h).
#pragma once

#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstddef>
#include <optional>
#include <tuple>
#include <type_traits>
#include <utility>

namespace maxmoe::ops {

// A type of arguments.
template <class T>
constexpr bool is_tensor = std::is_same_v<T, at::Tensor> || std::is_same_v<T, std::optional<at::Tensor>>;

// A string as template argument.
template <size_t size>
struct Name {
  constexpr Name(const char (&characters)[size]) { std::copy_n(characters, size, text); }
  char text[size]{};
};

// Returns the function that calls an operator through the dispatcher; `Operator` knows its type. It is compiled in the
// library once, and not in the module of every Python, where it took a third of the time. GCC cannot export
// Operator::operator() itself: a template argument of class type, such as Name, makes it hidden.
using AnyFunction = void (*)();
[[gnu::visibility("default")]] AnyFunction call_of(const char* name);

template <Name kName, class Signature>
class Operator;

template <Name kName, class Return, class... Args>
class Operator<kName, Return(Args...)> {
 public:
  static constexpr const char* name = kName.text;
  using Arguments = std::tuple<std::decay_t<Args>...>;

  Return operator()(Args... args) const {
    // Once per operator, because the lookup hashes the name.
    static const auto call = reinterpret_cast<Return (*)(Args...)>(call_of(name));
    return call(std::forward<Args>(args)...);
  }
};

}  // namespace maxmoe::ops
