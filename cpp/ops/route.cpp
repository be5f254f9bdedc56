#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <string_view>
#include <tuple>

#include "kernels/routing/route.h"
#include "ops/backend.h"
#include "ops/operators.h"
#include "ops/route_aten.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

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

ScoreFunction parse_score_function(const char* op, std::string_view name) {
  if (name == "softmax") return ScoreFunction::softmax;
  if (name == "sigmoid") return ScoreFunction::sigmoid;
  if (name == "sqrtsoftplus") return ScoreFunction::sqrtsoftplus;
  if (name == "identity") return ScoreFunction::identity;
  MAXMOE_CHECK(false, op, "score_function must be softmax, sigmoid, sqrtsoftplus or identity, got ", name);
}

GroupScore parse_group_score(std::string_view name) {
  if (name == "top2") return GroupScore::top2;
  if (name == "max") return GroupScore::max;
  MAXMOE_CHECK(false, kRoute, "group_score must be top2 or max, got ", name);
}

Normalization parse_normalization(const char* op, std::string_view name) {
  if (name == "none") return Normalization::none;
  if (name == "sum") return Normalization::sum;
  if (name == "softmax") return Normalization::softmax;
  MAXMOE_CHECK(false, op, "normalization must be none, sum or softmax, got ", name);
}

RoutingRule rule_of(const Options& o) {
  return {parse_score_function(kRoute, o.score_function),
          parse_normalization(kRoute, o.normalization),
          o.scale,
          o.num_groups,
          o.top_k_groups,
          parse_group_score(o.group_score)};
}

void check_route(const Tensor& logits, const Options& options) {
  const auto& [top_k, score_function, correction_bias, num_groups, top_k_groups, group_score, normalization, scale,
               experts] = options;
  Argument(kRoute, "logits", logits).has_dims(2, "[T, E]").is_floating();
  const int64_t num_experts = logits.size(1);
  MAXMOE_CHECK(1 <= top_k && top_k <= num_experts, kRoute, "top_k must be in [1, num_experts (", num_experts,
               ")], got ", top_k);
  MAXMOE_CHECK(num_groups >= 1 && num_experts % num_groups == 0, kRoute, "num_groups must divide num_experts (",
               num_experts, "), got ", num_groups);
  MAXMOE_CHECK(1 <= top_k_groups && top_k_groups <= num_groups, kRoute, "top_k_groups must be in [1, num_groups (",
               num_groups, ")], got ", top_k_groups);
  MAXMOE_CHECK(top_k <= num_experts / num_groups * top_k_groups, kRoute, "top_k must not exceed the ",
               num_experts / num_groups * top_k_groups, " experts of top_k_groups (", top_k_groups, ") groups, got ",
               top_k);
  if (correction_bias.has_value()) {
    Argument(kRoute, "correction_bias", *correction_bias).has_dims(1, "[E]").is_floating();
    Argument(kRoute, "correction_bias", *correction_bias).has_size(0, num_experts, "E of logits");
  }
  if (experts.has_value()) {
    Argument(kRoute, "experts", *experts).has_dims(2, "[T, K]").is_int64().has_size(0, logits.size(0), "T of logits");
    Argument(kRoute, "experts", *experts).has_size(1, top_k, "top_k").has_values_in(-1, num_experts, "-1 or one of E");
  }
}

Routing route_kernel(const Tensor& logits, int64_t top_k, const OptionalTensor& correction_bias,
                     const OptionalTensor& given, const RoutingRule& rule) {
  const Tensor weights = at::empty({logits.size(0), top_k}, logits.options());
  const Tensor probabilities = at::empty(logits.sizes(), logits.options());
  const OptionalTensor given_rows = given.has_value() ? OptionalTensor(given->contiguous()) : std::nullopt;
  const Tensor experts = at::empty({logits.size(0), top_k}, logits.options().dtype(at::kLong));
  // Only float32 and float64: the scores of 16-bit logits are computed in float32.
  const Tensor source = contiguous_rows(logits);
  const auto run = [&]<class T>() {
    maxmoe::route(Route<T>{const_view<T>(source), const_pointer<T>(correction_bias), const_pointer<int64_t>(given_rows),
                           rule, view<T>(weights), view<int64_t>(experts), view<T>(probabilities)},
                  torch_executor());
  };
  logits.scalar_type() == at::kDouble ? run.operator()<double>() : run.operator()<float>();
  return {weights, experts, probabilities};
}

template <class... OptionTypes>
Routing route_backend(const Tensor& logits, OptionTypes... options) {
  const Options o{options...};
  const RoutingRule rule = rule_of(o);
  check_route(logits, o);
  const auto type = accumulator_type(logits.scalar_type());
  const Tensor wide = logits.to(type);
  const auto bias =
      o.correction_bias.has_value() ? OptionalTensor(o.correction_bias->to(type).contiguous()) : std::nullopt;
  const Routing routing = uses_kernels(logits) ? route_kernel(wide, o.top_k, bias, o.experts, rule)
                                               : route_aten(wide, o.top_k, bias, o.experts, rule);
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

void check_backward(const Tensor& grad_weights, const OptionalTensor& grad_probabilities, const Tensor& logits,
                    const Tensor& experts) {
  Argument(kRouteBackward, "logits", logits).has_dims(2, "[T, E]").is_floating();
  Argument(kRouteBackward, "experts", experts)
      .has_dims(2, "[T, K]")
      .is_int64()
      .has_size(0, logits.size(0), "T of logits");
  Argument(kRouteBackward, "grad_weights", grad_weights).has_dims(2, "[T, K]").is_floating();
  Argument(kRouteBackward, "grad_weights", grad_weights).has_size(0, logits.size(0), "T of logits");
  Argument(kRouteBackward, "grad_weights", grad_weights).has_size(1, experts.size(1), "K of experts");
  Argument(kRouteBackward, "experts", experts).has_values_in(-1, logits.size(1), "-1 or one of E experts");
  if (!grad_probabilities.has_value()) return;
  Argument(kRouteBackward, "grad_probabilities", *grad_probabilities).has_dims(2, "[T, E]").is_floating();
  Argument(kRouteBackward, "grad_probabilities", *grad_probabilities).has_size(0, logits.size(0), "T of logits");
  Argument(kRouteBackward, "grad_probabilities", *grad_probabilities).has_size(1, logits.size(1), "E of logits");
}

Tensor route_backward_backend(const Tensor& grad_weights, const OptionalTensor& grad_probabilities,
                              const Tensor& logits, const Tensor& experts, std::string_view score_function,
                              std::string_view normalization, double scale) {
  const RoutingRule rule{parse_score_function(kRouteBackward, score_function),
                         parse_normalization(kRouteBackward, normalization), scale, 1, 1};
  check_backward(grad_weights, grad_probabilities, logits, experts);
  const auto type = accumulator_type(logits.scalar_type());
  const Tensor wide = logits.to(type).contiguous();
  const Tensor grad = grad_weights.to(type).contiguous();
  const OptionalTensor grad_all =
      grad_probabilities.has_value() ? OptionalTensor(grad_probabilities->to(type).contiguous()) : std::nullopt;
  if (!uses_kernels(logits)) return route_backward_aten(grad, grad_all, wide, experts, rule).to(logits.scalar_type());
  const Tensor ids = experts.contiguous();
  const Tensor out = at::empty_like(wide);
  const auto run = [&]<class T>() {
    maxmoe::route_backward(
        RouteBackward<T>{const_view<T>(grad), grad_all.has_value() ? const_view<T>(*grad_all) : ConstMatrixView<T>{},
                         const_view<T>(wide), const_view<int64_t>(ids), rule, view<T>(out)},
        torch_executor());
  };
  type == at::kDouble ? run.operator()<double>() : run.operator()<float>();
  return out.to(logits.scalar_type());
}

class RouteNode : public torch::autograd::Function<RouteNode> {
 public:
  static variable_list forward(AutogradContext* ctx, const Tensor& logits, const Options& o) {
    const auto [weights, experts, probabilities] =
        route(logits, o.top_k, o.score_function, o.correction_bias, o.num_groups, o.top_k_groups, o.group_score,
              o.normalization, o.scale, o.experts);
    ctx->set_materialize_grads(false);  // no zeros of the size of the probabilities if no loss reads them
    ctx->save_for_backward({logits, experts});
    ctx->saved_data["score_function"] = std::string(o.score_function);
    ctx->saved_data["normalization"] = std::string(o.normalization);
    ctx->saved_data["scale"] = o.scale;
    return {weights, experts, probabilities};
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    const auto [logits, experts] = saved_tensors<2>(ctx);
    const Tensor no_gradient;
    if (!grads[0].defined() && !grads[2].defined()) return {no_gradient, no_gradient};
    const Tensor grad_weights = grads[0].defined() ? grads[0] : at::zeros(experts.sizes(), grads[2].options());
    const OptionalTensor grad_probabilities = optional_tensor(grads[2]);
    const std::string_view score_function = ctx->saved_data["score_function"].toStringRef();
    const std::string_view normalization = ctx->saved_data["normalization"].toStringRef();
    const double scale = ctx->saved_data["scale"].toDouble();
    // The kernel has no gradient of its own, so that a second derivative is computed with ATen.
    if (!is_transformed(grad_weights) && !(grad_probabilities.has_value() && is_transformed(*grad_probabilities))) {
      return {route_backward(grad_weights, grad_probabilities, logits, experts, score_function, normalization, scale),
              no_gradient};
    }
    const RoutingRule rule{parse_score_function(kRouteBackward, score_function),
                           parse_normalization(kRouteBackward, normalization), scale, 1, 1};
    const Tensor wide = logits.to(accumulator_type(logits.scalar_type()));
    return {route_backward_aten(grad_weights, grad_probabilities, wide, experts, rule).to(logits.scalar_type()),
            no_gradient};
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
    return {routing_weights_aten(wide, experts, rule), experts, probabilities_aten(wide, rule.score_function)};
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  route.define<route_backend, RouteGradient>(
      library,
      "route(Tensor logits, int top_k, *, str score_function=\"softmax\", Tensor? correction_bias=None, "
      "int num_groups=1, int top_k_groups=1, str group_score=\"top2\", str normalization=\"sum\", float scale=1.0, "
      "Tensor? experts=None) -> (Tensor, Tensor, Tensor)");
  route_backward.define<route_backward_backend>(
      library,
      "route_backward(Tensor grad_weights, Tensor? grad_probabilities, Tensor logits, Tensor experts, "
      "str score_function, str normalization, float scale) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
