// Arguments of the functions of maxmoe._C. A wrong type is a TypeError that names function, argument and what was got:
// the error of pybind11 prints all arguments, among them the values of tensors.
#pragma once

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_variable.h>

#include <optional>
#include <string_view>

#include "ops/projection.h"

namespace maxmoe::python {

namespace py = pybind11;

// Where an argument belongs, for errors.
struct Place {
  const char* function;
  const char* argument;
};

// An argument as Python passed it: a borrowed reference, which lives as long as the call.
template <class T>
struct Given {
  py::handle object;
};

// The plan of ragged_plan, in Python the named tuple maxmoe.ops.RaggedPlan.
struct RaggedPlan {
  at::Tensor slots, rows, group_sizes, dropped;
  int64_t top_k = 0;
};

// The class maxmoe.ops.RaggedPlan.
py::handle plan_class();

[[noreturn]] void refuse_type(const Place& place, const char* expected, py::handle got);

void read(const Place& place, py::handle given, at::Tensor& value);
void read(const Place& place, py::handle given, bool& value);
void read(const Place& place, py::handle given, int64_t& value);
void read(const Place& place, py::handle given, double& value);
void read(const Place& place, py::handle given, c10::SymInt& value);
void read(const Place& place, py::handle given, std::string_view& value);
void read(const Place& place, py::handle given, at::ScalarType& value);
void read(const Place& place, py::handle given, RaggedPlan& value);

template <class T>
void read(const Place& place, py::handle given, std::optional<T>& value) {
  if (!given.is_none()) read(place, given, value.emplace());
}

// A projection that is not read yet: its low-rank factors get the dtype of the rows that it multiplies.
struct GivenProjection {
  Place place;
  py::handle object;  // a tensor, a maxmoe.quantization.QuantizedStack, or a maxmoe.ops.Projection of either

  ops::Projection read(at::ScalarType dtype) const;
};

inline void read(const Place& place, py::handle given, GivenProjection& value) {
  value = {place, given};
}

}  // namespace maxmoe::python

namespace pybind11::detail {

// The name of a type in the signatures of the documentation.
template <class T>
struct NameInSignature {
  static constexpr auto value = make_caster<T>::name;
};
template <>
struct NameInSignature<int64_t> {
  static constexpr auto value = const_name("int");
};
template <>
struct NameInSignature<double> {
  static constexpr auto value = const_name("float");
};
template <>
struct NameInSignature<c10::SymInt> {
  static constexpr auto value = const_name("int | torch.SymInt");
};
template <class T>
struct NameInSignature<std::optional<T>> {
  static constexpr auto value = NameInSignature<T>::value + const_name(" | None");
};

// Takes any object. The signature in the documentation shows the type that `read` accepts.
template <class T>
struct type_caster<maxmoe::python::Given<T>> {
  static constexpr auto name = NameInSignature<T>::value;
  maxmoe::python::Given<T> value;

  template <class>
  using cast_op_type = maxmoe::python::Given<T>;
  operator maxmoe::python::Given<T>() const { return value; }
  bool load(handle source, bool /*convert*/) {
    value.object = source;
    return true;
  }
};

template <>
struct type_caster<maxmoe::python::RaggedPlan> {
  static constexpr auto name = const_name("maxmoe.ops.RaggedPlan");
  static handle cast(const maxmoe::python::RaggedPlan& plan, return_value_policy policy, handle parent);
};

template <>
struct type_caster<maxmoe::python::GivenProjection> {
  static constexpr auto name = const_name("torch.Tensor | maxmoe.quantization.QuantizedStack | maxmoe.ops.Projection");
};

}  // namespace pybind11::detail
