// The operator routed_experts: router and routed experts of a layer in one call.
#pragma once

#include "ops/expert_ffn/expert_ffn.h"
#include "ops/operator.h"

namespace maxmoe::ops {

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

// out, logits, weights, experts, probabilities, tokens_per_expert, dropped.
using Routed = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

inline constexpr Operator<"routed_experts", Signature<Routed, RoutedExpertsArguments>> routed_experts;

}  // namespace maxmoe::ops
