// Router and routed experts of a layer in one call: linear, route, ragged_plan and expert_ffn. With few tokens, four
// calls from Python take longer than the kernels. The operator has no kernel: each of the four is dispatched, recorded
// by autograd and cast by autocast as if Python had called it.
#include "ops/expert_ffn/expert_ffn.h"
#include "ops/operators.h"

namespace maxmoe::ops {
namespace {

struct RoutedExpertsArguments {
  Tensor x;
  Tensor router;
  OptionalTensor router_bias;
  int64_t top_k;
  std::string_view score_function;
  OptionalTensor correction_bias;
  int64_t num_groups;
  int64_t top_k_groups;
  std::string_view group_score;
  std::string_view normalization;
  double scale;
  OptionalTensor gate;
  Tensor up;
  Tensor down;
  OptionalTensor gate_bias;
  OptionalTensor up_bias;
  OptionalTensor down_bias;
  ActivationArguments activation;
  bool recompute;

  // All fields, in the order of the schema.
  template <class Self>
  static auto fields(Self& a) {
    return std::tuple_cat(std::tie(a.x, a.router, a.router_bias, a.top_k, a.score_function, a.correction_bias,
                                   a.num_groups, a.top_k_groups, a.group_score, a.normalization, a.scale, a.gate, a.up,
                                   a.down, a.gate_bias, a.up_bias, a.down_bias),
                          ActivationArguments::fields(a.activation), std::tie(a.recompute));
  }
};

using Routed = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

template <class... Arguments>
Routed routed_experts(Arguments... arguments) {
  const RoutedExpertsArguments given{arguments...};
  const Tensor logits = linear(given.x, given.router, given.router_bias, std::nullopt);
  const auto [weights, experts, probabilities] =
      route(logits, given.top_k, given.score_function, given.correction_bias, given.num_groups, given.top_k_groups,
            given.group_score, given.normalization, given.scale, std::nullopt);
  const c10::SymInt num_slots = experts.sym_numel();
  const OperatorCall running;  // the plan below is right, so that devices do not check its values
  const auto [slots, rows, group_sizes, dropped] =
      ragged_plan(experts, given.router.size(0), 0, std::nullopt, num_slots, num_slots);
  ExpertFfnArguments a{};
  a.x = given.x;
  a.weights = weights;
  a.slots = slots;
  a.rows = rows;
  a.group_sizes = group_sizes;
  a.top_k = given.top_k;
  a.gate = {{given.gate}, given.gate_bias};
  a.up = {{given.up}, given.up_bias};
  a.down = {{given.down}, given.down_bias};
  a.activation = given.activation;
  a.recompute = given.recompute;
  return {call(expert_ffn, a), logits, weights, experts, probabilities, dropped};
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  const std::string schema =
      "routed_experts(Tensor x, Tensor router, Tensor? router_bias, int top_k, str score_function, Tensor? "
      "correction_bias, int num_groups, int top_k_groups, str group_score, str normalization, float scale, Tensor? "
      "gate, Tensor up, Tensor down, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, ";
  library.def((schema + ActivationArguments::kSchema +
               ", bool recompute=False) -> (Tensor out, Tensor logits, Tensor weights, Tensor experts, Tensor "
               "probabilities, Tensor dropped)")
                  .c_str(),
              static_cast<Signature<Routed, RoutedExpertsArguments>*>(&routed_experts));
}

}  // namespace
}  // namespace maxmoe::ops
