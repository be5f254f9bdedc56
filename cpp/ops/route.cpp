#include <ATen/ops/empty.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <string_view>
#include <tuple>

#include "kernels/route.h"
#include "ops/autograd.h"
#include "ops/backend.h"
#include "ops/checks.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kOp = "route";

TORCH_LIBRARY_FRAGMENT(maxmoe, m) {
  m.def(
      "route(Tensor logits, int top_k, *, str score_function=\"softmax\", Tensor? correction_bias=None, "
      "int num_groups=1, int top_k_groups=1, str group_score=\"top2\", str normalization=\"sum\", float scale=1.0) "
      "-> (Tensor weights, Tensor experts)");
  m.def(
      "route_backward(Tensor grad_weights, Tensor logits, Tensor experts, str score_function, str normalization, "
      "float scale) -> Tensor");
}

using Routing = std::tuple<Tensor, Tensor>;

Routing call_route(const Tensor& logits, int64_t top_k, std::string_view score_function,
                   const OptionalTensor& correction_bias, int64_t num_groups, int64_t top_k_groups,
                   std::string_view group_score, std::string_view normalization, double scale);
Tensor call_route_backward(const Tensor& grad_weights, const Tensor& logits, const Tensor& experts,
                           std::string_view score_function, std::string_view normalization, double scale);

ScoreFunction parse_score_function(std::string_view name) {
  if (name == "softmax") return ScoreFunction::softmax;
  if (name == "sigmoid") return ScoreFunction::sigmoid;
  if (name == "sqrtsoftplus") return ScoreFunction::sqrtsoftplus;
  if (name == "identity") return ScoreFunction::identity;
  MAXMOE_CHECK(false, kOp, "score_function must be softmax, sigmoid, sqrtsoftplus or identity, got ", name);
}

GroupScore parse_group_score(std::string_view name) {
  if (name == "top2") return GroupScore::top2;
  if (name == "max") return GroupScore::max;
  MAXMOE_CHECK(false, kOp, "group_score must be top2 or max, got ", name);
}

Normalization parse_normalization(std::string_view name) {
  if (name == "none") return Normalization::none;
  if (name == "sum") return Normalization::sum;
  if (name == "softmax") return Normalization::softmax;
  MAXMOE_CHECK(false, kOp, "normalization must be none, sum or softmax, got ", name);
}

void check(const Tensor& logits, int64_t top_k, const OptionalTensor& correction_bias, int64_t num_groups,
           int64_t top_k_groups) {
  Argument(kOp, "logits", logits).has_dims(2, "[T, E]").is_floating();
  const int64_t num_experts = logits.size(1);
  MAXMOE_CHECK(1 <= top_k && top_k <= num_experts, kOp, "top_k must be in [1, num_experts (", num_experts, ")], got ",
               top_k);
  MAXMOE_CHECK(num_groups >= 1 && num_experts % num_groups == 0, kOp, "num_groups must divide num_experts (",
               num_experts, "), got ", num_groups);
  MAXMOE_CHECK(1 <= top_k_groups && top_k_groups <= num_groups, kOp, "top_k_groups must be in [1, num_groups (",
               num_groups, ")], got ", top_k_groups);
  MAXMOE_CHECK(top_k <= num_experts / num_groups * top_k_groups, kOp, "top_k must not exceed the ",
               num_experts / num_groups * top_k_groups, " experts of top_k_groups (", top_k_groups, ") groups, got ",
               top_k);
  if (!correction_bias.has_value()) return;
  Argument(kOp, "correction_bias", *correction_bias).has_dims(1, "[E]").is_floating();
  Argument(kOp, "correction_bias", *correction_bias).has_size(0, num_experts, "E of logits");
  Argument(kOp, "correction_bias", *correction_bias).is_on_device_of("logits", logits);
}

Tensor score(const Tensor& logits, ScoreFunction function) {
  switch (function) {
    case ScoreFunction::softmax:
      return at::softmax(logits, 1);
    case ScoreFunction::sigmoid:
      return logits.sigmoid();
    case ScoreFunction::sqrtsoftplus:  // at::softplus is the identity above its threshold
      return (logits.clamp_min(0) + logits.abs().neg().exp().log1p()).sqrt();
    case ScoreFunction::identity:
      return logits;
  }
  return logits;
}

Tensor normalize(const Tensor& selected, Normalization normalization) {
  if (normalization == Normalization::sum) return selected / (selected.sum(1, true) + 1e-20);
  if (normalization == Normalization::softmax) return at::softmax(selected, 1);
  return selected;
}

// Descending, and stable: the lowest index first among equals.
Tensor order_of(const Tensor& keys) {
  return keys.argsort(/*stable=*/true, 1, /*descending=*/true);
}

// Experts by falling biased score, those outside the best groups after all others.
Tensor expert_order(const Tensor& biased, const RoutingRule& rule) {
  const Tensor order = order_of(biased);
  if (rule.num_groups == 1) return order;
  const int64_t group_size = biased.size(1) / rule.num_groups;
  const Tensor by_group = biased.view({-1, rule.num_groups, group_size});
  const int64_t counted = rule.group_score == GroupScore::top2 ? 2 : 1;
  const Tensor group_scores = std::get<0>(by_group.topk(std::min<int64_t>(counted, group_size), 2)).sum(2);
  const Tensor groups = order_of(group_scores).narrow(1, 0, rule.top_k_groups);
  const Tensor is_open = at::zeros_like(group_scores).scatter(1, groups, 1).repeat_interleave(group_size, 1);
  return order.gather(1, order_of(is_open.gather(1, order)));
}

Routing route_aten(const Tensor& logits, int64_t top_k, const OptionalTensor& correction_bias,
                   const RoutingRule& rule) {
  const Tensor scores = score(logits, rule.score_function);
  const Tensor biased = correction_bias.has_value() ? scores + *correction_bias : scores;
  const Tensor order = expert_order(biased, rule);
  const Tensor is_number = biased.isnan().any(1, true).logical_not();
  const Tensor experts = at::where(is_number, order.narrow(1, 0, top_k), -1);
  return {normalize(scores.gather(1, experts.clamp_min(0)), rule.normalization) * rule.scale, experts};
}

Routing route_kernel(const Tensor& logits, int64_t top_k, const OptionalTensor& correction_bias,
                     const RoutingRule& rule) {
  const Tensor weights = at::empty({logits.size(0), top_k}, logits.options());
  const Tensor experts = at::empty({logits.size(0), top_k}, logits.options().dtype(at::kLong));
  const Tensor source = contiguous_rows(logits);
  const auto run = [&]<class T>() {
    maxmoe::route(Route<T>{const_view<T>(source), const_pointer<T>(correction_bias), rule, view<T>(weights),
                           view<int64_t>(experts)},
                  torch_executor());
  };
  logits.scalar_type() == at::kDouble ? run.operator()<double>() : run.operator()<float>();
  return {weights, experts};
}

Routing route_backend(const Tensor& logits, int64_t top_k, std::string_view score_function,
                      const OptionalTensor& correction_bias, int64_t num_groups, int64_t top_k_groups,
                      std::string_view group_score, std::string_view normalization, double scale) {
  const RoutingRule rule{
      parse_score_function(score_function), parse_normalization(normalization), scale, num_groups, top_k_groups,
      parse_group_score(group_score)};
  check(logits, top_k, correction_bias, num_groups, top_k_groups);
  const auto type = accumulator_type(logits.scalar_type());
  const Tensor wide = logits.to(type);
  const auto bias = correction_bias.has_value() ? OptionalTensor(correction_bias->to(type).contiguous()) : std::nullopt;
  const Routing routing =
      uses_kernels(logits) ? route_kernel(wide, top_k, bias, rule) : route_aten(wide, top_k, bias, rule);
  // Both mark a token whose scores are not numbers with expert -1.
  const Tensor& experts = std::get<1>(routing);
  if (logits.is_cpu()) {
    const auto ids = experts.accessor<int64_t, 2>();
    for (int64_t token = 0; token < ids.size(0); ++token) {
      if (ids[token][0] >= 0) continue;
      MAXMOE_CHECK(!bias.has_value() || !bias->isnan().any().item<bool>(), kOp,
                   "correction_bias must be numbers, got NaN");
      MAXMOE_CHECK(false, kOp,
                   "logits must give scores that are numbers (no NaN, softmax also no +inf and not only "
                   "-inf), got NaN for token ",
                   token, " of ", logits.size(0));
    }
  } else {
    Argument(kOp, "logits", experts.select(1, 0)).has_values_in(0, logits.size(1), "NaN scores");
  }
  return routing;
}

Tensor score_slope(const Tensor& logits, const Tensor& scores, ScoreFunction function) {
  if (function == ScoreFunction::sigmoid) return scores * (1 - scores);
  return at::where(scores.gt(0), logits.sigmoid() / (2 * scores), at::zeros({}, scores.options()));
}

Tensor route_backward_aten(const Tensor& grad_weights, const Tensor& logits, const Tensor& experts,
                           const RoutingRule& rule) {
  const Tensor scores = score(logits, rule.score_function);
  const Tensor selected = scores.gather(1, experts);
  Tensor grad = grad_weights * rule.scale;
  if (rule.normalization == Normalization::sum) {
    const Tensor total = selected.sum(1, true) + 1e-20;
    grad = (grad - (grad * selected).sum(1, true) / total) / total;
  } else if (rule.normalization == Normalization::softmax) {
    const Tensor softmax = at::softmax(selected, 1);
    grad = softmax * (grad - (grad * softmax).sum(1, true));
  }
  const Tensor grad_scores = at::zeros_like(scores).scatter_add(1, experts, grad);
  if (rule.score_function == ScoreFunction::identity) return grad_scores;
  if (rule.score_function == ScoreFunction::softmax) {
    return scores * (grad_scores - (grad_scores * scores).sum(1, true));
  }
  return grad_scores * score_slope(logits, scores, rule.score_function);
}

Tensor route_backward_backend(const Tensor& grad_weights, const Tensor& logits, const Tensor& experts,
                              std::string_view score_function, std::string_view normalization, double scale) {
  const RoutingRule rule{parse_score_function(score_function), parse_normalization(normalization), scale, 1, 1};
  const auto type = accumulator_type(logits.scalar_type());
  const Tensor wide = logits.to(type).contiguous();
  const Tensor grad = grad_weights.to(type).contiguous();
  if (!uses_kernels(logits)) return route_backward_aten(grad, wide, experts, rule).to(logits.scalar_type());
  const Tensor ids = experts.contiguous();
  const Tensor out = at::empty_like(wide);
  const auto run = [&]<class T>() {
    maxmoe::route_backward(
        RouteBackward<T>{const_view<T>(grad), const_view<T>(wide), const_view<int64_t>(ids), rule, view<T>(out)},
        torch_executor());
  };
  type == at::kDouble ? run.operator()<double>() : run.operator()<float>();
  return out.to(logits.scalar_type());
}

class Gradient : public torch::autograd::Function<Gradient> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, int64_t top_k, std::string score_function,
                               const OptionalTensor& correction_bias, int64_t num_groups, int64_t top_k_groups,
                               std::string group_score, std::string normalization, double scale) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    auto [weights, experts] = call_route(logits, top_k, score_function, correction_bias, num_groups, top_k_groups,
                                         group_score, normalization, scale);
    ctx->save_for_backward({logits, experts});
    ctx->mark_non_differentiable({experts});
    ctx->saved_data["score_function"] = score_function;
    ctx->saved_data["normalization"] = normalization;
    ctx->saved_data["scale"] = scale;
    return {weights, experts};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor grad_logits =
        call_route_backward(grads[0], saved[0], saved[1], ctx->saved_data["score_function"].toStringRef(),
                            ctx->saved_data["normalization"].toStringRef(), ctx->saved_data["scale"].toDouble());
    return {grad_logits, Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor(), Tensor()};
  }
};

Routing route_autograd(const Tensor& logits, int64_t top_k, std::string_view score_function,
                       const OptionalTensor& correction_bias, int64_t num_groups, int64_t top_k_groups,
                       std::string_view group_score, std::string_view normalization, double scale) {
  if (needs_gradient(logits)) {
    const auto outputs = Gradient::apply(logits, top_k, std::string(score_function), correction_bias, num_groups,
                                         top_k_groups, std::string(group_score), std::string(normalization), scale);
    return {outputs[0], outputs[1]};
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_route(logits, top_k, score_function, correction_bias, num_groups, top_k_groups, group_score,
                    normalization, scale);
}

TORCH_LIBRARY_IMPL(maxmoe, CompositeExplicitAutograd, m) {
  m.impl("route", &route_backend);
  m.impl("route_backward", &route_backward_backend);
}
TORCH_LIBRARY_IMPL(maxmoe, Autograd, m) {
  m.impl("route", &route_autograd);
  m.impl("route_backward", torch::autograd::autogradNotImplementedFallback());
}

Routing call_route(const Tensor& logits, int64_t top_k, std::string_view score_function,
                   const OptionalTensor& correction_bias, int64_t num_groups, int64_t top_k_groups,
                   std::string_view group_score, std::string_view normalization, double scale) {
  static const auto op = find_operator<decltype(call_route)>("maxmoe::route");
  return op.call(logits, top_k, score_function, correction_bias, num_groups, top_k_groups, group_score, normalization,
                 scale);
}

Tensor call_route_backward(const Tensor& grad_weights, const Tensor& logits, const Tensor& experts,
                           std::string_view score_function, std::string_view normalization, double scale) {
  static const auto op = find_operator<decltype(call_route_backward)>("maxmoe::route_backward");
  return op.call(grad_weights, logits, experts, score_function, normalization, scale);
}

}  // namespace
}  // namespace maxmoe::ops
