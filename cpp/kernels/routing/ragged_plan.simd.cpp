// The plan is a counting sort of the slots by expert: two passes over the slots, without comparisons.
#include "kernels/routing/ragged_plan.h"

#include "kernels/matrix/row.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// The scratch slots: the next free row of each expert, and the end of its rows.
constexpr int kNextRowScratch = 0;
constexpr int kEndRowScratch = 1;

// Counts the rows of each local expert. Rows past max_rows are dropped, beginning with the experts of the highest ids.
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

// Assigns rows to slots: the second half of a counting sort. The slots are visited in order, so that the sort is
// stable.
template <class Index>
void place_slots(const RaggedPlan<Index>& plan) {
  auto* next = scratch<Index>(kNextRowScratch, plan.num_local_experts);
  auto* end = scratch<Index>(kEndRowScratch, plan.num_local_experts);
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

// Runs on the calling thread: the row of a slot depends on all slots before it.
template <class Index>
void ragged_plan(const RaggedPlan<Index>& plan, const Executor& /*executor*/) {
  // The first of two calls counts the rows, the second one assigns them (ragged_plan.h).
  if (plan.slots == nullptr) {
    count_rows(plan);
  } else {
    place_slots(plan);
  }
}

template void ragged_plan<int64_t>(const RaggedPlan<int64_t>&, const Executor&);

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
