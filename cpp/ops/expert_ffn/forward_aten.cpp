// The forward pass of expert_ffn through ATen, in two variants with the same steps. One is for devices without kernels:
// only the device reads the plan, so that the host does not wait for the device. The other is differentiable on every
// device, for second derivatives and forward-mode AD.
#include <ATen/ops/empty.h>

#include "ops/expert_ffn/steps.h"

namespace maxmoe::ops {

Outputs expert_ffn_aten(const ExpertFfnArguments& a, Differentiable differentiable, bool keeps_intermediates) {
  const Steps steps(a, differentiable);
  const auto [z, saved, reduced_gate, reduced_up] = project_tokens(a, steps, keeps_intermediates);
  const auto [gate, up] = z.parts(a.gate_layout(), steps.elementwise_type);
  const Tensor activated = activated_rows(a.kind(), gate, up).to(a.x.scalar_type());
  Tensor reduced_down;
  const Tensor out = steps.weighted_sum_of_rows({[&] {
    const auto [rows, reduced] = project(activated, a.down, steps);
    reduced_down = reduced;
    return rows;
  }});
  if (keeps_intermediates) return {out, saved, Reduced{reduced_gate, reduced_up, reduced_down}.side_by_side(a)};
  return {out, at::empty({0, a.preactivation_width()}, a.x.options()),
          at::empty({0, a.reduced_width()}, a.x.options())};
}

}  // namespace maxmoe::ops
