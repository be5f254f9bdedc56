#include "kernels/experts/gmm.h"

#include "cases.h"

namespace maxmoe::benchmarks {
namespace {

const Registration registration([](Session& session) {
  for_experts(session, "gmm", [&]<class T>(const Case& c, const ExpertsShape& shape) {
    const auto [num_tokens, hidden_size, intermediate_size, num_experts, top_k] = shape;
    const Plan plan(num_tokens, num_experts, top_k);
    const Table<T> lhs(plan.num_rows(), hidden_size);
    const Table<T> rhs(num_experts * hidden_size, intermediate_size);
    const Table<T> out(plan.num_rows(), intermediate_size);
    const KernelGemm<T> gemm;
    const Gmm<T> product{.lhs = lhs.read(),
                         .rhs = {.weights = rhs.read_stack(num_experts)},
                         .group_sizes = plan.group_sizes.data(),
                         .num_groups = num_experts,
                         .group_offset = 0,
                         .gemm = &gemm,
                         .out = out.view()};
    time_products<T>(session, c, shape, /*count=*/1, [&] { gmm(product, session.threads()); });
  });
});

}  // namespace
}  // namespace maxmoe::benchmarks
