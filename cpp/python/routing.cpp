#include <ATen/core/LegacyTypeDispatch.h>

#include <limits>

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

// The operators of maxmoe/nn/losses.py, without Python and autograd between them.
at::Tensor router_entropy(const at::Tensor& probabilities) {
  const py::gil_scoped_release released;
  const at::AutoDispatchBelowADInplaceOrView guard;  // the dispatcher calls each operator once instead of twice
  const bool is_double = probabilities.scalar_type() == at::kDouble;
  const double tiny = is_double ? std::numeric_limits<double>::min() : std::numeric_limits<float>::min();
  const int64_t num_tokens = std::max<int64_t>(probabilities.size(0), 1);
  return probabilities.clamp_min(tiny).log().mul(probabilities).sum().neg().div(num_tokens);
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
  define(module, "router_entropy", &router_entropy, py::arg("probabilities"),
         "mean_t sum_e -p[t, e] log(p[t, e]), 0 without tokens; not differentiable.");
}

}  // namespace maxmoe::python
