#include "kernels/experts/tgmm.h"

#include "cases.h"

namespace maxmoe::benchmarks {
namespace {

const Registration registration([](Session& session) {
  for_experts(session, "tgmm", [&]<class T>(const Case& c, const ExpertsShape& shape) {
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
    time_products<T>(session, c, shape, /*count=*/1, [&] { tgmm(product, session.threads()); });
  });
});

}  // namespace
}  // namespace maxmoe::benchmarks
