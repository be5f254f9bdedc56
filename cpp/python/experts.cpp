#include "ops/expert_ffn/expert_ffn.h"
#include "python/define.h"

namespace maxmoe::python {
namespace {

at::Tensor expert_ffn(const at::Tensor& x, const std::optional<at::Tensor>& weights, const RaggedPlan& plan,
                      const std::optional<GivenProjection>& gate, const GivenProjection& up,
                      const GivenProjection& down, std::string_view activation, std::optional<double> limit,
                      std::string_view limit_target, std::optional<double> gate_softcap,
                      std::optional<double> up_softcap, std::optional<std::string_view> fused_gate, bool recompute) {
  ops::ExpertFfnArguments a;
  a.x = x;
  a.weights = weights;
  a.slots = plan.slots;
  a.rows = plan.rows;
  a.group_sizes = plan.group_sizes;
  a.top_k = plan.top_k;
  if (gate.has_value()) a.gate = gate->read(x.scalar_type());
  a.up = up.read(x.scalar_type());
  a.down = down.read(x.scalar_type());
  a.activation = {activation, limit, limit_target, gate_softcap, up_softcap};
  a.fused_gate = fused_gate;
  a.recompute = recompute;
  const py::gil_scoped_release released;
  return call(ops::expert_ffn, a);
}

}  // namespace

void define_experts(py::module_& module) {
  define(module, "expert_ffn", &expert_ffn, py::arg("x"), py::arg("weights"), py::arg("plan"), py::arg("gate"),
         py::arg("up"), py::arg("down"), py::arg("activation") = "silu", py::arg("limit") = py::none(),
         py::arg("limit_target") = "input", py::arg("gate_softcap") = py::none(), py::arg("up_softcap") = py::none(),
         py::arg("fused_gate") = py::none(), py::arg("recompute") = false,
         "Compute the routed experts: gather, gate and up, activation, down, weighted sum.");
}

}  // namespace maxmoe::python
