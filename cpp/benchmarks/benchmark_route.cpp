#include "kernels/routing/route.h"

#include "cases.h"

namespace maxmoe::benchmarks {
namespace {

struct RouteShape {
  int64_t num_tokens;
  int64_t num_experts;
  int64_t top_k;
  RoutingRule rule;
};
constexpr RoutingRule kSoftmax{ScoreFunction::softmax, Normalization::sum, 1.0, 1, 1};
// The routing of DeepSeek-V3.
constexpr RoutingRule kGroups{ScoreFunction::sigmoid, Normalization::sum, 1.0, 8, 4};
constexpr RouteShape kRouteShapes[] = {
    {16384, 256, 8, kGroups}, {2048, 64, 8, kSoftmax}, {2048, 8, 2, kSoftmax}, {16, 64, 8, kSoftmax}};

std::string shape_text(const RouteShape& shape) {
  return text({{'T', shape.num_tokens}, {'E', shape.num_experts}, {'K', shape.top_k}}) +
         (shape.rule.num_groups > 1 ? ", sigmoid, groups" : ", softmax");
}

struct Problem {
  explicit Problem(const RouteShape& shape)
      : logits(shape.num_tokens, shape.num_experts),
        bias(1, shape.num_experts),
        weights(shape.num_tokens, shape.top_k),
        probabilities(shape.num_tokens, shape.num_experts),
        experts(static_cast<size_t>(shape.num_tokens * shape.top_k)),
        routing{.logits = logits.read(),
                .correction_bias = shape.rule.num_groups > 1 ? bias.data() : nullptr,
                .given = nullptr,
                .rule = shape.rule,
                .weights = weights.view(),
                .experts = {experts.data(), shape.num_tokens, shape.top_k, shape.top_k},
                .probabilities = probabilities.view()} {
    route(routing, SerialExecutor());
  }

  Table<float> logits;
  Table<float> bias;
  Table<float> weights;
  Table<float> probabilities;
  std::vector<int64_t> experts;
  Route<float> routing;
};

void benchmark_forward(Session& session, const RouteShape& shape) {
  const Case c{"route", shape_text(shape), "float32"};
  if (!session.is_selected(c)) return;
  const Problem problem(shape);
  time_read(session, c, problem.logits.data(), problem.logits.bytes(),
            [&] { route(problem.routing, session.threads()); });
}

void benchmark_backward(Session& session, const RouteShape& shape) {
  const Case c{"route_backward", shape_text(shape), "float32"};
  if (!session.is_selected(c)) return;
  const Problem problem(shape);
  const Table<float> grad_weights(shape.num_tokens, shape.top_k);
  const Table<float> grad_logits(shape.num_tokens, shape.num_experts);
  const RouteBackward<float> backward{.grad_weights = grad_weights.read(),
                                      .grad_probabilities = {},
                                      .logits = problem.logits.read(),
                                      .experts = problem.routing.experts.as_const(),
                                      .rule = shape.rule,
                                      .grad_logits = grad_logits.view()};
  time_read_write(session, c, problem.logits, grad_logits, [&] { route_backward(backward, session.threads()); });
}

void benchmark_entropy(Session& session, const RouteShape& shape) {
  const Case c{"router_entropy", shape_text(shape), "float32"};
  if (!session.is_selected(c)) return;
  const Problem problem(shape);
  float out = 0;
  const RouterEntropy<float> entropy{problem.probabilities.read(), shape.num_tokens, &out};
  time_read(session, c, problem.probabilities.data(), problem.probabilities.bytes(),
            [&] { router_entropy(entropy, session.threads()); });
}

const Registration registration([](Session& session) {
  for (const RouteShape& shape : kRouteShapes) {
    benchmark_forward(session, shape);
    benchmark_backward(session, shape);
    benchmark_entropy(session, shape);
  }
});

}  // namespace
}  // namespace maxmoe::benchmarks
