#include <ATen/TensorOperators.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/softmax.h>
#include <ATen/ops/softplus.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>

#include <algorithm>
#include <limits>
#include <string_view>
#include <tuple>

#include "kernels/routing/route.h"
#include "ops/backend.h"
#include "ops/cuda_kernels.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/registration.h"
#include "ops/torch_internals.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// weights [T, K], experts [T, K], probabilities [T, E]
using Routing = std::tuple<Tensor, Tensor, Tensor>;

// Through ATen: for other devices, and differentiable any number of times.

// sqrt(softplus(x)). Where softplus underflows to 0, the derivative is set to 0, because the derivative of the square
// root is infinite there and would give NaN.
Tensor sqrt_softplus(const Tensor& logits) {
  constexpr double threshold = 40;  // softplus(x) = x from here on, in float64
  const Tensor softplus = at::softplus(logits, /*beta=*/1, threshold);
  const Tensor is_zero = softplus.eq(0);
  const Tensor zero = at::zeros({}, logits.options());
  return at::where(is_zero, zero, at::where(is_zero, zero + 1, softplus).sqrt());
}

Tensor score(const Tensor& logits, ScoreFunction function) {
  switch (function) {
    case ScoreFunction::softmax:
      return at::softmax(logits, 1);
    case ScoreFunction::sigmoid:
      return logits.sigmoid();
    case ScoreFunction::sqrtsoftplus:
      return sqrt_softplus(logits);
    case ScoreFunction::identity:
      return logits;
  }
  return logits;
}

// Normalizes the selected scores [T, K]. Slots without an expert are left out; `is_absent` is undefined without any.
Tensor normalize(const Tensor& selected, const Tensor& is_absent, Normalization normalization) {
  const auto present = [&](double left_out) {
    return is_absent.defined() ? selected.masked_fill(is_absent, left_out) : selected;
  };
  if (normalization == Normalization::sum) {
    const Tensor scores = present(0);
    return scores / (scores.sum(1, true) + kSumEpsilon);
  }
  // Not minus infinity, because the softmax of a token without any expert would be NaN.
  if (normalization == Normalization::softmax) return at::softmax(present(std::numeric_limits<float>::lowest()), 1);
  return selected;
}

Tensor scaled(const Tensor& weights, const RoutingRule& rule) {
  return rule.scale == 1 ? weights : weights * rule.scale;
}

// The weights of given experts [T, K]: scale * normalization(scores[t, experts[t]]), 0 for a negative expert.
Tensor weigh(const Tensor& scores, const Tensor& experts, const RoutingRule& rule) {
  const Tensor is_absent = experts.lt(0);
  const Tensor selected = scores.gather(1, experts.clamp_min(0));
  return scaled(normalize(selected, is_absent, rule.normalization), rule).masked_fill(is_absent, 0);
}

// Indices in descending order of the keys. Stable: among equal keys the lowest index comes first.
Tensor order_of(const Tensor& keys) {
  return keys.argsort(/*stable=*/true, 1, /*descending=*/true);
}

// Experts in descending order of the biased score. Experts outside of the best groups come last.
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

// The derivative of the elementwise score functions; 0 where the score underflows to 0.
Tensor score_slope(const Tensor& logits, const Tensor& scores, ScoreFunction function) {
  if (function == ScoreFunction::sigmoid) return scores * (1 - scores);
  const Tensor zero = at::zeros({}, scores.options());
  const Tensor is_positive = scores.gt(0);
  return at::where(is_positive, logits.sigmoid() / (2 * at::where(is_positive, scores, zero + 1)), zero);
}

// The scores of all experts, divided by their sum; for identity the softmax of the logits.
Tensor probabilities_of(const Tensor& logits, const Tensor& scores, ScoreFunction function) {
  if (function == ScoreFunction::softmax) return scores;
  if (function == ScoreFunction::identity) return at::softmax(logits, 1);
  return scores / (scores.sum(1, true) + kSumEpsilon);
}

// The experts of a token are kNotANumber if one of its scores is NaN.
Routing route_aten(const Tensor& logits, int64_t top_k, const OptionalTensor& correction_bias,
                   const OptionalTensor& given, const RoutingRule& rule) {
  const Tensor scores = score(logits, rule.score_function);
  const Tensor biased = correction_bias.has_value() ? scores + *correction_bias : scores;
  const Tensor chosen = given.has_value() ? *given : expert_order(biased, rule).narrow(1, 0, top_k);
  const Tensor is_nan = biased.isnan().any(1, true);
  const Tensor experts = chosen.masked_fill(is_nan, kNotANumber);
  const Tensor weights = given.has_value()
                             ? weigh(scores, experts, rule)
                             : scaled(normalize(scores.gather(1, chosen), Tensor(), rule.normalization), rule);
  return {weights, experts, probabilities_of(logits, scores, rule.score_function)};
}

Tensor route_backward_aten(const Tensor& grad_weights, const OptionalTensor& grad_probabilities, const Tensor& logits,
                           const Tensor& experts, const RoutingRule& rule) {
  const Tensor scores = score(logits, rule.score_function);
  const Tensor is_absent = experts.lt(0);
  const Tensor index = experts.clamp_min(0);
  const Tensor selected = scores.gather(1, index).masked_fill(is_absent, 0);
  Tensor grad = scaled(grad_weights.masked_fill(is_absent, 0), rule);
  if (rule.normalization == Normalization::sum) {
    const Tensor total = selected.sum(1, true) + kSumEpsilon;
    // The gradient of the largest score is subtracted first, see kernels/route.cpp. Scores other than logits are
    // positive.
    const Tensor size = rule.score_function == ScoreFunction::identity ? selected.abs() : selected;
    const Tensor common = grad.gather(1, size.argmax(1, true));
    grad = grad - common;
    grad = (grad - (grad * selected).sum(1, true).sub(common, kSumEpsilon) / total) / total;
  } else if (rule.normalization == Normalization::softmax) {
    const Tensor softmax = normalize(selected, is_absent, rule.normalization);
    grad = softmax * (grad - (grad * softmax).sum(1, true));
  }
  grad = grad.masked_fill(is_absent, 0);
  Tensor grad_scores = at::zeros_like(scores).scatter_add(1, index, grad);
  Tensor through_softmax;  // the part of the gradient that does not pass through the scores, for softmax and identity
  if (grad_probabilities.has_value()) {
    const Tensor probabilities = probabilities_of(logits, scores, rule.score_function);
    const Tensor centered = *grad_probabilities - (*grad_probabilities * probabilities).sum(1, true);
    if (rule.score_function == ScoreFunction::softmax || rule.score_function == ScoreFunction::identity) {
      through_softmax = probabilities * centered;
    } else {
      grad_scores = grad_scores + centered / (scores.sum(1, true) + kSumEpsilon);
    }
  }
  Tensor grad_logits = grad_scores;
  if (rule.score_function == ScoreFunction::softmax) {
    grad_logits = torch_internals::softmax_backward(grad_scores, scores);
  } else if (rule.score_function != ScoreFunction::identity) {
    grad_logits = grad_scores * score_slope(logits, scores, rule.score_function);
  }
  return through_softmax.defined() ? grad_logits + through_softmax : grad_logits;
}

// The operators.

constexpr const char* kRoute = "route";
constexpr const char* kRouteBackward = "route_backward";

constexpr Operator<"route_backward",
                   Tensor(const Tensor& grad_weights, const OptionalTensor& grad_probabilities, const Tensor& logits,
                          const Tensor& experts, std::string_view score_function, std::string_view normalization,
                          double scale)>
    route_backward;

// The arguments of the operator route after logits. `experts`, if given, replace the selection.
struct Options {
  int64_t top_k;
  std::string_view score_function;
  OptionalTensor correction_bias;
  int64_t num_groups;
  int64_t top_k_groups;
  std::string_view group_score;
  std::string_view normalization;
  double scale;
  OptionalTensor experts;
};

// The weights of given experts do not depend on the arguments with defaults.
RoutingRule parse_rule(const char* op, std::string_view score_function, std::string_view normalization, double scale,
                       int64_t num_groups = 1, int64_t top_k_groups = 1, std::string_view group_score = "top2") {
  return {parse<ScoreFunction>(op, "score_function", score_function,
                               {{"softmax", ScoreFunction::softmax},
                                {"sigmoid", ScoreFunction::sigmoid},
                                {"sqrtsoftplus", ScoreFunction::sqrtsoftplus},
                                {"identity", ScoreFunction::identity}}),
          parse<Normalization>(
              op, "normalization", normalization,
              {{"none", Normalization::none}, {"sum", Normalization::sum}, {"softmax", Normalization::softmax}}),
          scale,
          num_groups,
          top_k_groups,
          parse<GroupScore>(op, "group_score", group_score, {{"top2", GroupScore::top2}, {"max", GroupScore::max}})};
}

RoutingRule rule_of(const Options& o) {
  return parse_rule(kRoute, o.score_function, o.normalization, o.scale, o.num_groups, o.top_k_groups, o.group_score);
}

void check_route(const Tensor& logits, const Options& o) {
  Argument(kRoute, "logits", logits).has_dims(2, "[T, E]").is_floating();
  const int64_t num_experts = logits.size(1);
  MAXMOE_CHECK(1 <= o.top_k && o.top_k <= num_experts, kRoute, "top_k must be in [1, num_experts (", num_experts,
               ")], got ", o.top_k);
  MAXMOE_CHECK(o.num_groups >= 1 && num_experts % o.num_groups == 0, kRoute, "num_groups must divide num_experts (",
               num_experts, "), got ", o.num_groups);
  MAXMOE_CHECK(1 <= o.top_k_groups && o.top_k_groups <= o.num_groups, kRoute,
               "top_k_groups must be in [1, num_groups (", o.num_groups, ")], got ", o.top_k_groups);
  const int64_t num_open = num_experts / o.num_groups * o.top_k_groups;
  MAXMOE_CHECK(o.top_k <= num_open, kRoute, "top_k must not exceed the ", num_open, " experts of top_k_groups (",
               o.top_k_groups, ") groups, got ", o.top_k);
  if (o.correction_bias.has_value()) {
    Argument(kRoute, "correction_bias", *o.correction_bias)
        .has_shape("[E]", {{num_experts, "E of logits"}})
        .is_floating();
  }
  if (o.experts.has_value()) {
    Argument(kRoute, "experts", *o.experts)
        .is_int64()
        .has_shape("[T, K]", {{logits.size(0), "T of logits"}, {o.top_k, "top_k"}})
        .has_values_in(-1, num_experts, "-1 or one of E");
  }
}

// The CUDA kernels keep the scores of a token in shared memory, which has space for 2048 experts on every GPU.
bool uses_aten(const Tensor& logits) {
  constexpr int64_t kMostExpertsOnCuda = 2048;
  return path_of(logits, "route") == Path::aten ||
         (cuda_kernels(logits, "route") && logits.size(1) > kMostExpertsOnCuda);
}

Routing route_kernel(const Tensor& logits, int64_t top_k, const OptionalTensor& correction_bias,
                     const OptionalTensor& given, const RoutingRule& rule) {
  const Tensor weights = empty({logits.size(0), top_k}, logits.options());
  const Tensor probabilities = empty(logits.sizes(), logits.options());
  const Tensor experts = empty({logits.size(0), top_k}, logits.options().dtype(at::kLong));
  // Only float32 and float64: the scores of 16-bit logits are computed in float32.
  for_accumulator_type(logits.scalar_type(), [&]<class T>() {
    run(cuda_kernels(logits, "route"), &cuda::RouteKernels<T>::route, maxmoe::route<T>,
        {Rows(logits), List(correction_bias), List(given), rule, view<T>(weights), view<int64_t>(experts),
         view<T>(probabilities)});
  });
  return {weights, experts, probabilities};
}

template <class... OptionTypes>
Routing route_backend(const Tensor& logits, OptionTypes... options) {
  const Options o{options...};
  const RoutingRule rule = rule_of(o);
  check_route(logits, o);
  const auto type = accumulator_type(logits.scalar_type());
  const Tensor wide = with_dtype(logits, type);
  const auto bias = o.correction_bias.has_value() ? OptionalTensor(with_dtype(*o.correction_bias, type)) : std::nullopt;
  const Routing routing = uses_aten(logits) ? route_aten(wide, o.top_k, bias, o.experts, rule)
                                            : route_kernel(wide, o.top_k, bias, o.experts, rule);
  // A token whose scores are NaN is marked instead of raising an error at once, because other devices cannot raise.
  const Tensor& experts = std::get<1>(routing);
  if (logits.is_cpu()) {
    const auto ids = experts.accessor<int64_t, 2>();
    for (int64_t token = 0; token < ids.size(0); ++token) {
      if (ids[token][0] != kNotANumber) continue;
      MAXMOE_CHECK(!bias.has_value() || !bias->isnan().any().item<bool>(), kRoute,
                   "correction_bias must be numbers, got NaN");
      MAXMOE_CHECK(false, kRoute,
                   "logits must give scores that are numbers (no NaN, softmax also no +inf and not only "
                   "-inf), got NaN for token ",
                   token, " of ", logits.size(0));
    }
  } else {
    Argument(kRoute, "logits", experts.select(1, 0)).has_values_in(-1, logits.size(1), "NaN scores");
  }
  return routing;
}

Tensor route_backward_backend(const Tensor& grad_weights, const OptionalTensor& grad_probabilities,
                              const Tensor& logits, const Tensor& experts, std::string_view score_function,
                              std::string_view normalization, double scale) {
  constexpr const char* kOp = kRouteBackward;
  const RoutingRule rule = parse_rule(kRouteBackward, score_function, normalization, scale);
  Argument(kOp, "logits", logits).has_dims(2, "[T, E]").is_floating();
  const Size num_tokens{logits.size(0), "T of logits"};
  Argument(kOp, "experts", experts).has_dims(2, "[T, K]").is_int64().has_size(0, num_tokens.size, num_tokens.meaning);
  Argument(kOp, "grad_weights", grad_weights)
      .has_shape("[T, K]", {num_tokens, {experts.size(1), "K of experts"}})
      .is_floating();
  Argument(kOp, "experts", experts).has_values_in(-1, logits.size(1), "-1 or one of E experts");
  const auto type = accumulator_type(logits.scalar_type());
  OptionalTensor grad_all;
  if (grad_probabilities.has_value()) {
    Argument(kOp, "grad_probabilities", *grad_probabilities)
        .has_shape("[T, E]", {num_tokens, {logits.size(1), "E of logits"}})
        .is_floating();
    grad_all = grad_probabilities->to(type).contiguous();
  }
  const Tensor wide = logits.to(type).contiguous();
  const Tensor grad = grad_weights.to(type);
  if (uses_aten(logits)) return route_backward_aten(grad, grad_all, wide, experts, rule).to(logits.scalar_type());
  const Tensor ids = experts.contiguous();
  const Tensor out = at::empty_like(wide);
  for_accumulator_type(type, [&]<class T>() {
    run(cuda_kernels(logits, "route"), &cuda::RouteKernels<T>::route_backward, maxmoe::route_backward<T>,
        {Rows(grad), grad_all.has_value() ? const_view<T>(*grad_all) : ConstMatrixView<T>{}, const_view<T>(wide),
         const_view<int64_t>(ids), rule, view<T>(out)});
  });
  return out.to(logits.scalar_type());
}

class RouteNode : public torch::autograd::Function<RouteNode> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Options& o) {
    const auto [weights, experts, probabilities] =
        route(logits, o.top_k, o.score_function, o.correction_bias, o.num_groups, o.top_k_groups, o.group_score,
              o.normalization, o.scale, o.experts);
    ctx->set_materialize_grads(false);  // no zeros of the size of the probabilities if no loss reads them
    save_arguments(ctx, std::tie(logits, experts, o.score_function, o.normalization, o.scale));
    return {weights, experts, probabilities};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    if (!grads[0].defined() && !grads[2].defined()) return variable_list(2);
    Tensor logits;
    Tensor experts;
    std::string_view score_function;
    std::string_view normalization;
    double scale = 1;
    load_arguments(ctx, std::tie(logits, experts, score_function, normalization, scale));
    const Tensor grad_weights = grads[0].defined() ? grads[0] : at::zeros(experts.sizes(), grads[2].options());
    const OptionalTensor grad_probabilities = grads[2].defined() ? OptionalTensor(grads[2]) : std::nullopt;
    // The kernel is not differentiable, so that a second derivative is computed with ATen.
    if (is_transformed(grad_weights) || (grads[2].defined() && is_transformed(grads[2]))) {
      const Tensor wide = logits.to(accumulator_type(logits.scalar_type()));
      const RoutingRule rule = parse_rule(kRouteBackward, score_function, normalization, scale);
      return {route_backward_aten(grad_weights, grad_probabilities, wide, experts, rule).to(logits.scalar_type()),
              Tensor()};
    }
    return {route_backward(grad_weights, grad_probabilities, logits, experts, score_function, normalization, scale),
            Tensor()};
  }
};

struct RouteGradient {
  static Routing apply(const Tensor& logits, const auto&... options) {
    const variable_list outputs = RouteNode::apply(logits, Options{options...});
    return {outputs[0], outputs[1], outputs[2]};
  }

  // Selects the experts with the operator, and computes their weights with ATen, which has tangents.
  static Routing with_tangents(const Tensor& logits, const auto&... options) {
    const Tensor experts = [&] {
      const torch_internals::NoTangents no_tangents;  // otherwise this function would call itself
      return std::get<1>(route(logits, options...));
    }();
    const RoutingRule rule = rule_of(Options{options...});
    const Tensor wide = logits.to(accumulator_type(logits.scalar_type()));
    const Tensor scores = score(wide, rule.score_function);
    return {weigh(scores, experts, rule), experts, probabilities_of(wide, scores, rule.score_function)};
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<route, route_backend, RouteGradient>(
      library,
      "route(Tensor logits, int top_k, *, str score_function=\"softmax\", Tensor? correction_bias=None, "
      "int num_groups=1, int top_k_groups=1, str group_score=\"top2\", str normalization=\"sum\", float scale=1.0, "
      "Tensor? experts=None) -> (Tensor, Tensor, Tensor)");
  define<route_backward, route_backward_backend>(
      library,
      "route_backward(Tensor grad_weights, Tensor? grad_probabilities, Tensor logits, Tensor experts, "
      "str score_function, str normalization, float scale) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
