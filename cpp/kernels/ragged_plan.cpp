#include "ragged_plan.h"

#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Where max_rows cuts, the experts with the highest ids lose their rows first.
template <class Index>
void count_rows(const RaggedPlan<Index>& plan) {
  zero_row(plan.group_sizes, plan.num_local_experts);
  for (Index slot = 0; slot < plan.num_slots; ++slot) {
    const Index expert = plan.experts[slot] - plan.first_expert;
    if (plan.experts[slot] >= 0 && expert >= 0 && expert < plan.num_local_experts) ++plan.group_sizes[expert];
  }
  *plan.dropped = 0;
  if (plan.max_rows < 0) return;
  Index left = plan.max_rows;
  for (Index expert = 0; expert < plan.num_local_experts; ++expert) {
    const Index kept = plan.group_sizes[expert] < left ? plan.group_sizes[expert] : left;
    *plan.dropped += plan.group_sizes[expert] - kept;
    plan.group_sizes[expert] = kept;
    left -= kept;
  }
}

// The second half of a counting sort. Slots are visited in order, so that it is stable.
template <class Index>
void place_slots(const RaggedPlan<Index>& plan) {
  auto* next = scratch<Index>(0, plan.num_local_experts);
  auto* end = scratch<Index>(1, plan.num_local_experts);
  Index total = 0;
  for (Index expert = 0; expert < plan.num_local_experts; ++expert) {
    next[expert] = total;
    total += plan.group_sizes[expert];
    end[expert] = total;
  }
  for (Index slot = 0; slot < plan.num_slots; ++slot) {
    const Index expert = plan.experts[slot] - plan.first_expert;
    const bool is_local = plan.experts[slot] >= 0 && expert >= 0 && expert < plan.num_local_experts;
    if (is_local && next[expert] < end[expert]) {
      plan.slots[next[expert]] = slot;
      plan.rows[slot] = next[expert]++;
    } else {
      plan.rows[slot] = -1;
    }
  }
}

}  // namespace

template <class Index>
void ragged_plan(const RaggedPlan<Index>& plan, const Executor& /*executor*/) {
  if (plan.slots == nullptr) {
    count_rows(plan);
  } else {
    place_slots(plan);
  }
}

template void ragged_plan<int64_t>(const RaggedPlan<int64_t>&, const Executor&);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
