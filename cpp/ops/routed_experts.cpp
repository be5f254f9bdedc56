// Router and routed experts of a layer in one call: linear, route, ragged_plan and expert_ffn. With few tokens, four
// calls from Python take longer than the kernels. The operator has no kernel: each of the four is dispatched, recorded
// by autograd and cast by autocast as if Python had called it.
#include "ops/expert_ffn/expert_ffn.h"
#include "ops/operators.h"

namespace maxmoe::ops {
namespace {

struct RoutedExpertsArguments {
  Tensor router;
  OptionalTensor router_bias;
  std::string_view score_function;
  OptionalTensor correction_bias;
  int64_t num_groups = 1;
  int64_t top_k_groups = 1;
  std::string_view group_score;
  std::string_view normalization;
  double scale = 1;
  ExpertFfnArguments ffn;  // weights and plan are computed

  // All arguments, in the order of the schema.
  template <class Self>
  static auto fields(Self& r) {
    auto& a = r.ffn;
    return std::tuple_cat(std::tie(a.x, r.router, r.router_bias, a.top_k, r.score_function, r.correction_bias,
                                   r.num_groups, r.top_k_groups, r.group_score, r.normalization, r.scale, a.gate.tensor,
                                   a.up.tensor, a.down.tensor, a.gate.bias, a.up.bias, a.down.bias),
                          ActivationArguments::fields(a.activation), std::tie(a.recompute));
  }
};

using Routed = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class... Arguments>
Routed routed_experts(Arguments... arguments) {
  RoutedExpertsArguments given;
  RoutedExpertsArguments::fields(given) = std::tie(arguments...);
  ExpertFfnArguments& a = given.ffn;
  const Tensor logits = linear(a.x, given.router, given.router_bias, std::nullopt);
  const auto [weights, experts, probabilities] =
      route(logits, a.top_k, given.score_function, given.correction_bias, given.num_groups, given.top_k_groups,
            given.group_score, given.normalization, given.scale, std::nullopt);
  a.weights = weights;
  const c10::SymInt num_slots = experts.sym_numel();
  const OperatorCall running;  // the plan below is right, so that devices do not check its values
  Tensor dropped;
  std::tie(a.slots, a.rows, a.group_sizes, dropped) =
      ragged_plan(experts, given.router.size(0), 0, std::nullopt, num_slots, num_slots);
  return {call(expert_ffn, a), logits, weights, experts, probabilities, dropped};
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  const std::string schema =
      "routed_experts(Tensor x, Tensor router, Tensor? router_bias, int top_k, str score_function, Tensor? "
      "correction_bias, int num_groups, int top_k_groups, str group_score, str normalization, float scale, Tensor? "
      "gate, Tensor? up, Tensor? down, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, ";
  library.def((schema + ActivationArguments::kSchema +
               ", bool recompute=False) -> (Tensor out, Tensor logits, Tensor weights, Tensor experts, Tensor "
               "probabilities, Tensor dropped)")
                  .c_str(),
              static_cast<Signature<Routed, RoutedExpertsArguments>*>(&routed_experts));
}

}  // namespace
}  // namespace maxmoe::ops
