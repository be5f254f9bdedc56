#include "ops/operators.h"
#include "python/define.h"

namespace maxmoe::python {
namespace {

RaggedPlan ragged_plan(const at::Tensor& experts, int64_t num_experts, int64_t first_expert,
                       std::optional<int64_t> num_local_experts, const std::optional<c10::SymInt>& max_rows,
                       const std::optional<c10::SymInt>& num_rows) {
  const auto [slots, rows, group_sizes, dropped] =
      run(ops::ragged_plan, experts, num_experts, first_expert, num_local_experts, max_rows, num_rows);
  return {slots, rows, group_sizes, dropped, experts.size(1)};
}

}  // namespace

void define_routing(py::module_& module) {
  define<ops::route>(module, py::arg("logits"), py::arg("top_k"), py::arg("score_function") = "softmax",
                     py::arg("correction_bias") = py::none(), py::arg("num_groups") = 1, py::arg("top_k_groups") = 1,
                     py::arg("group_score") = "top2", py::arg("normalization") = "sum", py::arg("scale") = 1.0,
                     py::arg("experts") = py::none(), "Return weights and experts (T, K) and probabilities (T, E).");
  define(module, "ragged_plan", &ragged_plan, py::arg("experts"), py::arg("num_experts"), py::arg("first_expert") = 0,
         py::arg("num_local_experts") = py::none(), py::arg("max_rows") = py::none(), py::arg("num_rows") = py::none(),
         "Sort the slots (T, K) by expert.");
  define<ops::router_entropy>(module, py::arg("probabilities"), py::arg("divisor"),
                              "sum over t and e of -p[t, e] log(p[t, e]) / divisor, through which no gradient flows.");
}

}  // namespace maxmoe::python
