// Router and routed experts of a layer in one call: linear, route, ragged_plan and expert_ffn. With few tokens, four
// calls from Python take longer than the kernels. The operator has no kernel: each of the four is dispatched, recorded
// by autograd and cast by autocast as if Python had called it.
#include "ops/expert_ffn/expert_ffn.h"
#include "ops/operators.h"

namespace maxmoe::ops {
namespace {

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor> routed_experts(
    const Tensor& x, const Tensor& router, const OptionalTensor& router_bias, int64_t top_k,
    std::string_view score_function, const OptionalTensor& correction_bias, int64_t num_groups, int64_t top_k_groups,
    std::string_view group_score, std::string_view normalization, double scale, const OptionalTensor& gate,
    const Tensor& up, const Tensor& down, const OptionalTensor& gate_bias, const OptionalTensor& up_bias,
    const OptionalTensor& down_bias, std::string_view activation, std::optional<double> limit, bool recompute) {
  const Tensor logits = linear(x, router, router_bias, std::nullopt);
  const auto [weights, experts, probabilities] = route(logits, top_k, score_function, correction_bias, num_groups,
                                                       top_k_groups, group_score, normalization, scale, std::nullopt);
  const c10::SymInt num_slots = experts.sym_numel();
  const OperatorCall running;  // the plan below is right, so that devices do not check its values
  const auto [slots, rows, group_sizes, dropped] =
      ragged_plan(experts, router.size(0), 0, std::nullopt, num_slots, num_slots);
  ExpertFfnArguments a{};
  a.x = x;
  a.weights = weights;
  a.slots = slots;
  a.rows = rows;
  a.group_sizes = group_sizes;
  a.top_k = top_k;
  a.gate = {{gate}, gate_bias};
  a.up = {{up}, up_bias};
  a.down = {{down}, down_bias};
  a.activation = activation;
  a.limit = limit;
  a.recompute = recompute;
  return {call(expert_ffn, a), logits, weights, experts, probabilities, dropped};
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  library.def(
      "routed_experts(Tensor x, Tensor router, Tensor? router_bias, int top_k, str score_function, Tensor? "
      "correction_bias, int num_groups, int top_k_groups, str group_score, str normalization, float scale, Tensor? "
      "gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, str activation, float? "
      "limit, bool recompute) -> (Tensor out, Tensor logits, Tensor weights, Tensor experts, Tensor probabilities, "
      "Tensor dropped)",
      routed_experts);
}

}  // namespace
}  // namespace maxmoe::ops
