// Functions of maxmoe._C.
#pragma once

#include <torch/csrc/Exceptions.h>

#include <array>
#include <tuple>
#include <type_traits>

#include "ops/operator.h"
#include "python/argument.h"

namespace maxmoe::python {

// Runs an operator by its typed handle, without the global interpreter lock: the dispatcher of torch takes the lock
// again for dispatch modes and fake kernels in Python.
template <class Op, class... Args>
auto run(const Op& op, Args&&... args) {
  const py::gil_scoped_release released;
  return op(std::forward<Args>(args)...);
}

// The names of the arguments among the attributes of a function.
template <size_t count>
std::array<const char*, count> argument_names(const auto&... attributes) {
  std::array<const char*, count> names{};
  size_t position = 0;
  const auto add = [&]<class Attribute>(const Attribute& attribute) {
    if constexpr (std::is_base_of_v<py::arg, Attribute>) names.at(position++) = attribute.name;
  };
  (add(attributes), ...);
  return names;
}

template <class... T, size_t... position>
std::tuple<T...> read_arguments(const char* function, const std::array<const char*, sizeof...(T)>& names,
                                std::index_sequence<position...> /*positions*/, const Given<T>&... given) {
  std::tuple<T...> values;
  (read({function, names[position]}, given.object, std::get<position>(values)), ...);
  return values;
}

// A function of the module with typed arguments. The attributes are the names of its arguments, with default values,
// and its docstring, in one order.
template <class Return, class... Args>
void define(py::module_& module, const char* name, Return (*function)(Args...), const auto&... attributes) {
  const auto names = argument_names<sizeof...(Args)>(attributes...);
  module.def(
      name,
      [=](Given<std::decay_t<Args>>... given) {
        HANDLE_TH_ERRORS
        return std::apply(
            function, read_arguments<std::decay_t<Args>...>(name, names, std::index_sequence_for<Args...>(), given...));
        END_HANDLE_TH_ERRORS_PYBIND
      },
      attributes...);
}

// An operator with the arguments of its schema.
template <const auto& op, ops::Name kName, class Return, class... Args>
void define_operator(py::module_& module, const ops::Operator<kName, Return(Args...)>& /*op*/,
                     const auto&... attributes) {
  define(module, kName.text, +[](Args... args) -> Return { return run(op, args...); }, attributes...);
}
template <const auto& op>
void define(py::module_& module, const auto&... attributes) {
  define_operator<op>(module, op, attributes...);
}

void define_products(py::module_& module);
void define_rows(py::module_& module);
void define_routing(py::module_& module);
void define_experts(py::module_& module);
void define_routed_experts(py::module_& module);
void define_library(py::module_& module);

}  // namespace maxmoe::python
