// Router and routed experts of a layer in one call: linear, route, ragged_plan and expert_ffn. With few tokens, four
// calls from Python take longer than the kernels. The operator has no kernel: each of the four is dispatched, recorded
// by autograd and cast by autocast as if Python had called it.
#include "ops/routed_experts.h"

#include <ATen/ops/_unsafe_view.h>

#include "ops/operators.h"
#include "ops/registration.h"

namespace maxmoe::ops {
namespace {

// Below autograd, the dispatcher calls an operator once instead of twice.
using BelowAutograd = at::AutoDispatchBelowADInplaceOrView;

// Whether autograd has nothing to do: no gradient is recorded, no tensor has a tangent, and no transform of torch.func
// runs, which wraps tensors.
template <class... T>
bool is_without_autograd(const std::tuple<T&...>& arguments) {
  return std::apply(
      [](const auto&... argument) {
        return !(at::GradMode::is_enabled() && (requires_grad(argument) || ...)) && !(has_tangent(argument) || ...) &&
               torch_internals::supports_autograd_function();
      },
      arguments);
}

template <class... Arguments>
Routed compute(Arguments... arguments) {
  RoutedExpertsArguments given;
  const auto fields = RoutedExpertsArguments::fields(given);
  std::apply([&](auto&... field) { ((field = std::move(arguments)), ...); }, fields);
  ExpertFfnArguments& a = given.ffn;
  const Tensor x = a.x;
  TORCH_CHECK_VALUE(x.dim() >= 2, "maxmoe::routed_experts: x must have shape [..., D], got ", x.sym_sizes());
  if (x.dim() > 2) a.x = x.reshape_symint({-1, x.sym_size(-1)});
  std::optional<BelowAutograd> guard;
  if (is_without_autograd(fields)) guard.emplace();

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
  Tensor out = call(expert_ffn, a);
  // A view would lose the backward hook that FSDP registers on this tensor.
  if (x.dim() > 2) out = at::_unsafe_view_symint(out, x.sym_sizes());
  return {out, logits, weights, experts, probabilities, a.group_sizes, dropped};
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  const std::string schema =
      "routed_experts(Tensor x, Tensor router, Tensor? router_bias, int top_k, str score_function, Tensor? "
      "correction_bias, int num_groups, int top_k_groups, str group_score, str normalization, float scale, Tensor? "
      "gate, Tensor? up, Tensor? down, Tensor? gate_bias, Tensor? up_bias, Tensor? down_bias, ";
  define_composite<routed_experts>(
      library,
      schema + ActivationArguments::kSchema +
          ", bool recompute=False) -> (Tensor out, Tensor logits, Tensor weights, Tensor experts, Tensor "
          "probabilities, Tensor tokens_per_expert, Tensor dropped)",
      static_cast<Signature<Routed, RoutedExpertsArguments>*>(&compute));
}

}  // namespace
}  // namespace maxmoe::ops
