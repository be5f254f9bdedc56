#include "ops/operators.h"
#include "python/define.h"

namespace maxmoe::python {

void define_rows(py::module_& module) {
  define<ops::ragged_gather>(module, py::arg("x"), py::arg("index"), py::arg("weights") = py::none(),
                             py::arg("start") = 0, py::arg("end") = py::none(),
                             "out[i] = weights[i] * x[index[i]]   for start <= i < end and index[i] >= 0, else 0");
  define<ops::ragged_gather_reduce>(module, py::arg("rows"), py::arg("index"), py::arg("group_size"),
                                    py::arg("weights") = py::none(), py::arg("valid") = py::none(),
                                    "out[t] = sum_j weights[j] * rows[index[j]]   over the valid j of group t");
  define<ops::ragged_scatter_add>(module, py::arg("rows"), py::arg("index"), py::arg("num_rows"),
                                  py::arg("group_size") = 1, py::arg("weights") = py::none(),
                                  "out[n] = sum_j weights[j] * rows[j // group_size]   over the j with index[j] == n");
  define<ops::ragged_dot>(module, py::arg("a"), py::arg("b"), py::arg("index"), py::arg("group_size") = 1,
                          "out[j] = <a[j // group_size], b[index[j]]>   for index[j] >= 0, else 0");
  define(
      module, "ragged_sort",
      +[](const at::Tensor& x, const RaggedPlan& plan, const std::optional<at::Tensor>& weights) {
        return run(ops::ragged_sort, x, plan.slots, plan.rows, plan.top_k, weights);
      },
      py::arg("x"), py::arg("plan"), py::arg("weights") = py::none(),
      "out[r] = weights[slots[r]] * x[slots[r] // K]   for the rows of a plan");
  define(
      module, "ragged_unsort",
      +[](const at::Tensor& rows, const RaggedPlan& plan, const std::optional<at::Tensor>& weights) {
        return run(ops::ragged_unsort, rows, plan.slots, plan.rows, plan.top_k, weights);
      },
      py::arg("rows"), py::arg("plan"), py::arg("weights") = py::none(),
      "out[t] = sum_k weights[t, k] * rows[plan.rows[t * K + k]]   over the slots that have a row");
}

}  // namespace maxmoe::python
