#include "kernels/gmm.h"

#include "contenders.h"

namespace maxmoe::benchmarks {
namespace {

template <class T>
void benchmark(Session& session, const ExpertsShape& shape) {
  const Case c{"gmm", text(shape), dtype_name<T>()};
  if (!session.wants(c)) return;
  const auto [num_tokens, hidden_size, intermediate_size, num_experts, top_k] = shape;
  const Plan plan(num_tokens, num_experts, top_k);
  const Table<T> lhs(plan.num_rows(), hidden_size);
  const Table<T> rhs(num_experts * hidden_size, intermediate_size);
  const Table<T> out(plan.num_rows(), intermediate_size);
  const KernelGemm<T> gemm;
  const Gmm<T> product{.lhs = lhs.read(),
                       .rhs = rhs.read_stack(num_experts),
                       .bias = {},
                       .group_sizes = plan.group_sizes.data(),
                       .num_groups = num_experts,
                       .group_offset = 0,
                       .gemm = &gemm,
                       .out = out.view()};
  const DenseProducts<T> dense(1, plan.num_rows(), hidden_size, intermediate_size);
  session.time(c, flops(plan.num_rows() * hidden_size * intermediate_size),
               {kernel([&] { gmm(product, session.threads()); }), dense.bound(session.threads())});
}

const Registration registration([](Session& session) {
  for (const ExpertsShape& shape : kExpertsShapes) {
    benchmark<float>(session, shape);
    benchmark<BFloat16>(session, shape);
  }
});

}  // namespace
}  // namespace maxmoe::benchmarks
