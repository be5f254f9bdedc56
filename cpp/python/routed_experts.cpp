#include "ops/routed_experts.h"

#include <pybind11/typing.h>

#include <string>

#include "python/define.h"

namespace maxmoe::python {
namespace {

using Table = py::typing::Dict<py::str, py::object>;

// A parameter or a buffer of a module, by name in its table; null for None, and for a name that the table lacks.
class Entry {
 public:
  explicit Entry(const char* name)
      : name_(name), key_(py::reinterpret_steal<py::str>(PyUnicode_InternFromString(name))) {}

  py::handle of(const Table& table) const {
    PyObject* const found = PyDict_GetItemWithError(table.ptr(), key_.ptr());
    if (found == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    return found == Py_None ? nullptr : found;
  }
  void read(const Table& table, ops::OptionalTensor& value) const {
    if (const py::handle found = of(table)) python::read({"routed_experts", name_}, found, value);
  }

 private:
  const char* name_;
  py::str key_;
};

// The operator routed_experts with the arguments that are the same in every call of a layer.
class RoutedExperts {
 public:
  RoutedExperts(int64_t hidden_size, int64_t top_k, std::string score_function, int64_t num_groups,
                int64_t top_k_groups, std::string group_score, std::string normalization, double scale,
                std::string activation, std::optional<double> limit, std::string limit_target,
                std::optional<double> gate_softcap, std::optional<double> up_softcap)
      : hidden_size_(hidden_size),
        strings_{std::move(score_function), std::move(group_score), std::move(normalization), std::move(activation),
                 std::move(limit_target)} {
    constants_.score_function = strings_[0];
    constants_.num_groups = num_groups;
    constants_.top_k_groups = top_k_groups;
    constants_.group_score = strings_[1];
    constants_.normalization = strings_[2];
    constants_.scale = scale;
    constants_.ffn.top_k = top_k;
    constants_.ffn.activation = {strings_[3], limit, strings_[4], gate_softcap, up_softcap};
  }
  RoutedExperts(const RoutedExperts&) = delete;
  RoutedExperts& operator=(const RoutedExperts&) = delete;
  ~RoutedExperts() = default;

  // Other tensors may take the place of parameters from call to call, and modules the place of quantized ones. Returns
  // nothing if a matrix is not a tensor, or x has another dtype than the matrices, or another size.
  std::optional<ops::Routed> operator()(const at::Tensor& x, const Table& router, const Table& router_buffers,
                                        const Table& experts, bool recompute) const {
    ops::RoutedExpertsArguments a = constants_;
    ops::OptionalTensor weight;
    weight_.read(router, weight);
    bias_.read(router, a.router_bias);
    correction_bias_.read(router_buffers, a.correction_bias);
    gate_.read(experts, a.ffn.gate.tensor);
    up_.read(experts, a.ffn.up.tensor);
    down_.read(experts, a.ffn.down.tensor);
    gate_bias_.read(experts, a.ffn.gate.bias);
    up_bias_.read(experts, a.ffn.up.bias);
    down_bias_.read(experts, a.ffn.down.bias);
    if (!weight.has_value() || !a.ffn.up.is_given() || !a.ffn.down.is_given()) return std::nullopt;
    const bool has_size = x.dim() >= 2 && x.sym_size(-1).maybe_as_int() == hidden_size_;
    if (!has_size || x.scalar_type() != a.ffn.up.tensor->scalar_type()) return std::nullopt;
    a.ffn.x = x;
    a.router = *std::move(weight);
    a.ffn.recompute = recompute;
    return std::apply([](const auto&... fields) { return run(ops::routed_experts, fields...); },
                      ops::RoutedExpertsArguments::fields(a));
  }

 private:
  int64_t hidden_size_;
  std::array<std::string, 5> strings_;
  ops::RoutedExpertsArguments constants_;  // refers to the strings
  Entry weight_{"weight"}, bias_{"bias"}, correction_bias_{"score_correction_bias"};
  Entry gate_{"gate_proj"}, up_{"up_proj"}, down_{"down_proj"};
  Entry gate_bias_{"gate_bias"}, up_bias_{"up_bias"}, down_bias_{"down_bias"};
};

// Whether none of the entries (table, name) is there and true.
bool are_false(const py::typing::Tuple<py::typing::Tuple<Table, py::str>, py::ellipsis>& entries) {
  for (const py::handle entry : entries) {
    const bool is_pair = PyTuple_Check(entry.ptr()) && PyTuple_GET_SIZE(entry.ptr()) == 2;
    if (!is_pair || !PyDict_Check(PyTuple_GET_ITEM(entry.ptr(), 0))) {
      refuse_type({"are_false", "entries"}, "pairs of a dict and a name", entry);
    }
    PyObject* const found = PyDict_GetItemWithError(PyTuple_GET_ITEM(entry.ptr(), 0), PyTuple_GET_ITEM(entry.ptr(), 1));
    const int is_true = found == nullptr ? 0 : PyObject_IsTrue(found);
    if (is_true < 0 || (found == nullptr && PyErr_Occurred() != nullptr)) throw py::error_already_set();
    if (is_true == 1) return false;
  }
  return true;
}

}  // namespace

void define_routed_experts(py::module_& module) {
  py::class_<RoutedExperts>(
      module, "RoutedExperts",
      "Router and experts of a layer in one call of the operator `routed_experts`, whose constants are given once.")
      .def(py::init<int64_t, int64_t, std::string, int64_t, int64_t, std::string, std::string, double, std::string,
                    std::optional<double>, std::string, std::optional<double>, std::optional<double>>(),
           py::arg("hidden_size"), py::arg("top_k"), py::arg("score_function"), py::arg("num_groups"),
           py::arg("top_k_groups"), py::arg("group_score"), py::arg("normalization"), py::arg("scale"),
           py::arg("activation"), py::arg("limit"), py::arg("limit_target"), py::arg("gate_softcap"),
           py::arg("up_softcap"))
      .def(
          "__call__",
          [](const RoutedExperts& self, Given<at::Tensor> x, const Table& router, const Table& router_buffers,
             const Table& experts, bool recompute) {
            HANDLE_TH_ERRORS
            at::Tensor tokens;
            read({"routed_experts", "x"}, x.object, tokens);
            return self(tokens, router, router_buffers, experts, recompute);
            END_HANDLE_TH_ERRORS_PYBIND
          },
          py::arg("x"), py::arg("router"), py::arg("router_buffers"), py::arg("experts"), py::arg("recompute"),
          "Route tokens (..., D) and compute their experts.\n\n"
          "Returns out, logits, weights, experts, probabilities, tokens_per_expert and dropped; None if x has another "
          "size\nor dtype than the experts, or their matrices are not tensors in the table of parameters.");
  module.def("are_false", &are_false, py::arg("entries"),
             "Return whether no entry (table, name) is there and true, as an attribute of a module with a hook is.");
}

}  // namespace maxmoe::python
