#include "kernels/routing/ragged_plan.h"

#include "cases.h"

namespace maxmoe::benchmarks {
namespace {

struct PlanShape {
  int64_t num_tokens;
  int64_t num_experts;
  int64_t top_k;
};
constexpr PlanShape kPlanShapes[] = {{16384, 256, 8}, {2048, 64, 8}, {2048, 8, 2}, {16, 64, 8}};

const Registration registration([](Session& session) {
  for (const PlanShape& shape : kPlanShapes) {
    const Case c{"ragged_plan", text({{'T', shape.num_tokens}, {'E', shape.num_experts}, {'K', shape.top_k}}), "int64"};
    if (!session.is_selected(c)) continue;
    Plan plan(shape.num_tokens, shape.num_experts, shape.top_k);
    const size_t size = plan.experts.size() * sizeof(int64_t);
    time_read(session, c, plan.experts.data(), size, [&] { plan.compute(session.threads()); });
  }
});

}  // namespace
}  // namespace maxmoe::benchmarks
