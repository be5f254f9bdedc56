#include "kernels/experts/expert_ffn.h"

#include <algorithm>
#include <limits>

#include "cases.h"

namespace maxmoe::benchmarks {
namespace {

constexpr ActivationKind kKind{Activation::silu, GateLayout::separate, std::numeric_limits<double>::infinity()};

// Tokens, their routing, and the weights of the experts.
template <class T>
struct Problem {
  explicit Problem(const ExpertsShape& shape)
      : plan(shape.num_tokens, shape.num_experts, shape.top_k),
        num_experts(shape.num_experts),
        x(shape.num_tokens, shape.hidden_size),
        weights(plan.num_rows(), 1),
        gate(num_experts * shape.hidden_size, shape.intermediate_size),
        up(num_experts * shape.hidden_size, shape.intermediate_size),
        down(num_experts * shape.intermediate_size, shape.hidden_size),
        preactivations(plan.num_rows(), 2 * shape.intermediate_size),
        routed{plan.slots.data(), plan.rows.data(), plan.group_sizes.data(), num_experts, shape.top_k} {}

  // Without biases and factors.
  ExpertFfnCall<T> call() const {
    ExpertFfnCall<T> ffn{x.read(), weights.data(), routed, {}, kKind, &gemm};
    ffn.experts.gate.weights = gate.read_stack(num_experts);
    ffn.experts.up.weights = up.read_stack(num_experts);
    ffn.experts.down.weights = down.read_stack(num_experts);
    return ffn;
  }

  Plan plan;
  int64_t num_experts;
  Table<T> x;
  Table<Accumulator<T>> weights;
  Table<T> gate;
  Table<T> up;
  Table<T> down;
  Table<T> preactivations;
  RoutedRows routed;
  KernelGemm<T> gemm;
};

template <class T>
void benchmark_forward(Session& session, const Case& c, const ExpertsShape& shape) {
  const Problem<T> problem(shape);
  const Table<T> rows(problem.plan.num_rows(), shape.hidden_size);
  const Table<T> out(shape.num_tokens, shape.hidden_size);
  ExpertFfn<T> ffn{problem.call()};
  ffn.preactivations = problem.preactivations.view();
  ffn.rows = rows.view();
  ffn.out = out.view();
  time_products<T>(session, c, shape, /*count=*/3, [&] { expert_ffn(ffn, session.threads()); });
}

template <class T>
void benchmark_backward_down(Session& session, const Case& c, const ExpertsShape& shape) {
  const Problem<T> problem(shape);
  const int64_t num_rows = problem.plan.num_rows();
  const Table<T> grad_out(shape.num_tokens, shape.hidden_size);
  const Table<T> preactivations(num_rows, 2 * shape.intermediate_size);
  const Table<T> activated(num_rows, shape.intermediate_size);
  const Problem<T> gradients(shape);
  ExpertFfnBackwardDown<T> ffn{problem.call()};
  ffn.grad_out = grad_out.read();
  ffn.preactivations = preactivations.view();
  ffn.activated = activated.view();
  ffn.grad_weights = gradients.weights.data();
  ffn.grad_down = gradients.down.stack(shape.num_experts);
  const auto refill = [&](int64_t row) {  // they are overwritten
    std::copy_n(problem.preactivations.read().row(row), preactivations.view().columns, preactivations.view().row(row));
  };
  time_products<T>(session, c, shape, /*count=*/2, [&] {
    session.threads().run(num_rows, Task(refill));
    expert_ffn_backward_down(ffn, session.threads());
  });
}

template <class T>
void benchmark_backward_input(Session& session, const Case& c, const ExpertsShape& shape) {
  const Problem<T> problem(shape);
  const Table<T> rows(problem.plan.num_rows(), shape.hidden_size);
  const Table<T> grad_x(shape.num_tokens, shape.hidden_size);
  ExpertFfnBackwardInput<T> ffn{problem.call()};
  ffn.grad_preactivations = problem.preactivations.read();
  ffn.rows = rows.view();
  ffn.grad_x = grad_x.view();
  time_products<T>(session, c, shape, /*count=*/2, [&] { expert_ffn_backward_input(ffn, session.threads()); });
}

template <class T>
void benchmark_backward_up(Session& session, const Case& c, const ExpertsShape& shape) {
  const Problem<T> problem(shape);
  const Problem<T> gradients(shape);
  ExpertFfnBackwardUp<T> ffn{problem.call()};
  ffn.grad_preactivations = problem.preactivations.read();
  ffn.gate.weights = gradients.gate.stack(shape.num_experts);
  ffn.up.weights = gradients.up.stack(shape.num_experts);
  time_products<T>(session, c, shape, /*count=*/2, [&] { expert_ffn_backward_up(ffn, session.threads()); });
}

// The product with r columns counts as one product of the intermediate size.
template <class T>
void benchmark_backward_down_factors(Session& session, const Case& c, const ExpertsShape& shape) {
  constexpr int64_t kRank = 16;
  const Problem<T> problem(shape);
  const Table<T> grad_out(shape.num_tokens, shape.hidden_size);
  const Table<T> a(shape.num_experts * shape.intermediate_size, kRank);
  const Table<T> b(shape.num_experts * kRank, shape.hidden_size);
  const Table<T> grad_reduced(problem.plan.num_rows(), kRank);
  const Table<T> grad_a(shape.num_experts * shape.intermediate_size, kRank);
  ExpertFfnBackwardDownFactors<T> ffn{problem.call()};
  ffn.grad_out = grad_out.read();
  ffn.experts.down.factors = {a.read_stack(shape.num_experts), b.read_stack(shape.num_experts)};
  ffn.preactivations = problem.preactivations.read();
  ffn.grad_reduced = grad_reduced.view();
  ffn.grad_a = grad_a.stack(shape.num_experts);
  time_products<T>(session, c, shape, /*count=*/1, [&] { expert_ffn_backward_down_factors(ffn, session.threads()); });
}

const Registration registration([](Session& session) {
  for_experts(session, "expert_ffn",
              [&]<class T>(const Case& c, const ExpertsShape& shape) { benchmark_forward<T>(session, c, shape); });
  for_experts(session, "expert_ffn_backward_down_factors", [&]<class T>(const Case& c, const ExpertsShape& shape) {
    benchmark_backward_down_factors<T>(session, c, shape);
  });
  for_experts(session, "expert_ffn_backward_down", [&]<class T>(const Case& c, const ExpertsShape& shape) {
    benchmark_backward_down<T>(session, c, shape);
  });
  for_experts(session, "expert_ffn_backward_input", [&]<class T>(const Case& c, const ExpertsShape& shape) {
    benchmark_backward_input<T>(session, c, shape);
  });
  for_experts(session, "expert_ffn_backward_up",
              [&]<class T>(const Case& c, const ExpertsShape& shape) { benchmark_backward_up<T>(session, c, shape); });
});

}  // namespace
}  // namespace maxmoe::benchmarks
