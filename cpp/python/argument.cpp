#include "python/argument.h"

#include <pybind11/gil_safe_call_once.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/DynamicTypes.h>

#include <string>

namespace maxmoe::python {
namespace {

// A class of the package, looked up when it is first needed: the package imports this module.
template <class Key>
py::handle class_named(const char* module, const char* name) {
  PYBIND11_CONSTINIT static py::gil_safe_call_once_and_store<py::object> found;
  return found.call_once_and_store_result([&] { return py::module_::import(module).attr(name).cast<py::object>(); })
      .get_stored();
}

py::handle projection_class() {
  return class_named<struct OfProjection>("maxmoe.ops._projection", "Projection");
}

py::handle quantized_class() {
  return class_named<struct Quantized>("maxmoe.quantization", "QuantizedStack");
}

// An attribute of a quantized stack, whose constructor has checked its type.
template <class T>
T attribute(py::handle object, const char* name) {
  return object.attr(name).cast<T>();
}

}  // namespace

py::handle plan_class() {
  return class_named<struct Plan>("maxmoe.ops.routing", "RaggedPlan");
}

void refuse_type(const Place& place, const char* expected, py::handle got) {
  throw py::type_error(std::string("maxmoe::") + place.function + ": " + place.argument + " must be " + expected +
                       ", got " + Py_TYPE(got.ptr())->tp_name);
}

void read(const Place& place, py::handle given, at::Tensor& value) {
  if (!THPVariable_Check(given.ptr())) refuse_type(place, "a tensor", given);
  value = THPVariable_Unpack(given.ptr());
}

void read(const Place& place, py::handle given, bool& value) {
  if (!PyBool_Check(given.ptr())) refuse_type(place, "a bool", given);
  value = given.ptr() == Py_True;
}

void read(const Place& place, py::handle given, int64_t& value) {
  if (!PyIndex_Check(given.ptr()) || PyBool_Check(given.ptr())) refuse_type(place, "an int", given);
  value = PyNumber_AsSsize_t(given.ptr(), PyExc_OverflowError);
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
}

void read(const Place& place, py::handle given, double& value) {
  if (PyBool_Check(given.ptr())) refuse_type(place, "a float", given);
  value = PyFloat_AsDouble(given.ptr());
  if (value == -1 && PyErr_Occurred() != nullptr) {
    PyErr_Clear();
    refuse_type(place, "a float", given);
  }
}

void read(const Place& place, py::handle given, c10::SymInt& value) {
  py::detail::make_caster<c10::SymInt> caster;
  if (PyBool_Check(given.ptr()) || !caster.load(given, true)) refuse_type(place, "an int", given);
  value = py::detail::cast_op<c10::SymInt>(caster);
}

void read(const Place& place, py::handle given, std::string_view& value) {
  if (!PyUnicode_Check(given.ptr())) refuse_type(place, "a str", given);
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(given.ptr(), &size);
  if (text == nullptr) throw py::error_already_set();
  value = {text, static_cast<size_t>(size)};
}

void read(const Place& place, py::handle given, at::ScalarType& value) {
  if (!THPDtype_Check(given.ptr())) refuse_type(place, "a torch.dtype", given);
  value = reinterpret_cast<THPDtype*>(given.ptr())->scalar_type;
}

void read(const Place& place, py::handle given, RaggedPlan& value) {
  if (Py_TYPE(given.ptr()) != reinterpret_cast<PyTypeObject*>(plan_class().ptr())) {
    refuse_type(place, "a maxmoe.ops.RaggedPlan", given);
  }
  const auto item = [&](Py_ssize_t index) { return py::handle(PyTuple_GET_ITEM(given.ptr(), index)); };
  read({place.function, "plan.slots"}, item(0), value.slots);
  read({place.function, "plan.rows"}, item(1), value.rows);
  read({place.function, "plan.group_sizes"}, item(2), value.group_sizes);
  read({place.function, "plan.dropped"}, item(3), value.dropped);
  read({place.function, "plan.top_k"}, item(4), value.top_k);
}

namespace {

void read_weights(const Place& place, py::handle given, ops::Projection& value) {
  if (THPVariable_Check(given.ptr())) {
    value.tensor = THPVariable_Unpack(given.ptr());
    return;
  }
  if (!py::isinstance(given, quantized_class())) {
    refuse_type(place, "a tensor, a maxmoe.quantization.QuantizedStack or a maxmoe.ops.Projection", given);
  }
  value.tensor = attribute<at::Tensor>(given, "codes");
  TORCH_CHECK_VALUE(value.tensor->dim() == 3, "maxmoe::", place.function, ": ", place.argument,
                    " must be a stack of matrices (L, in, out), got ",
                    py::str(py::tuple(py::list(given.attr("shape")))).cast<std::string>());
  value.scales = attribute<at::Tensor>(given, "scales");
  value.zeros = attribute<std::optional<at::Tensor>>(given, "zeros");
  value.row_scales = attribute<std::optional<at::Tensor>>(given, "row_scales");
  // The string lives as long as the stack, which the caller holds.
  read(place, given.attr("format"), value.format);
  value.columns = attribute<int64_t>(given, "columns");
  value.is_transposed = attribute<bool>(given, "is_transposed");
}

}  // namespace

ops::Projection GivenProjection::read(at::ScalarType dtype) const {
  ops::Projection value;
  if (THPVariable_Check(object.ptr()) || !py::isinstance(object, projection_class())) {
    read_weights(place, object, value);
    return value;
  }
  // Without matrices, operators refuse the bias and the factors.
  const py::handle weights = PyTuple_GET_ITEM(object.ptr(), 0);
  if (!weights.is_none()) read_weights(place, weights, value);
  const std::string name = place.argument;
  python::read({place.function, (name + ".bias").c_str()}, PyTuple_GET_ITEM(object.ptr(), 1), value.bias);
  const py::handle factors = PyTuple_GET_ITEM(object.ptr(), 2);
  if (!factors.is_none()) {
    // The scale of the factors and the casts are operators of torch on small tensors; traced code computes them too.
    const py::object operands = py::module_::import("maxmoe.ops._projection").attr("operands");
    const py::handle dtype_of_rows(reinterpret_cast<PyObject*>(torch::getTHPDtype(dtype)));
    const py::tuple scaled = operands(factors, dtype_of_rows, name + ".factors");
    value.a = scaled[0].cast<at::Tensor>();
    value.b = scaled[1].cast<at::Tensor>();
  }
  return value;
}

}  // namespace maxmoe::python

namespace pybind11::detail {

handle type_caster<maxmoe::python::RaggedPlan>::cast(const maxmoe::python::RaggedPlan& plan,
                                                     return_value_policy /*policy*/, handle /*parent*/) {
  return maxmoe::python::plan_class()(plan.slots, plan.rows, plan.group_sizes, plan.dropped, plan.top_k).release();
}

}  // namespace pybind11::detail
