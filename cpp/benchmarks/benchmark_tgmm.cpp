#include "kernels/tgmm.h"

#include "contenders.h"

namespace maxmoe::benchmarks {
namespace {

template <class T>
void benchmark(Session& session, const ExpertsShape& shape) {
  const Case c{"tgmm", text(shape), dtype_name<T>()};
  if (!session.wants(c)) return;
  const auto [num_tokens, hidden_size, intermediate_size, num_experts, top_k] = shape;
  const Plan plan(num_tokens, num_experts, top_k);
  const Table<T> lhs(plan.num_rows(), hidden_size);
  const Table<T> rhs(plan.num_rows(), intermediate_size);
  const Table<T> out(num_experts * hidden_size, intermediate_size);
  const KernelGemm<T> gemm;
  const Tgmm<T> product{.lhs = lhs.read(),
                        .rhs = rhs.read(),
                        .group_sizes = plan.group_sizes.data(),
                        .num_groups = num_experts,
                        .group_offset = 0,
                        .gemm = &gemm,
                        .out = out.stack(num_experts)};
  const DenseProducts<T> dense(1, plan.num_rows(), hidden_size, intermediate_size);
  session.time(c, flops(plan.num_rows() * hidden_size * intermediate_size),
               {kernel([&] { tgmm(product, session.threads()); }), dense.bound(session.threads())});
}

const Registration registration([](Session& session) {
  for (const ExpertsShape& shape : kExpertsShapes) {
    benchmark<float>(session, shape);
    benchmark<BFloat16>(session, shape);
  }
});

}  // namespace
}  // namespace maxmoe::benchmarks
