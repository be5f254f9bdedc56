// Assigns rows to routed slots, grouped by expert. Integers only.
#pragma once

#include "kernels/executor.h"

namespace maxmoe {

// Selects the slots (t * K + k) whose expert is local, ordered by expert, then by slot; at most max_rows of them. It is
// called twice, because R is not known before the first call. With `slots` null it computes group_sizes and dropped,
// with `slots` of [R] it computes slots and rows.
template <class Index>
struct RaggedPlan {
  const Index* experts;  // [T * K], each in [-1, num_experts); -1 is a slot without an expert
  Index num_slots;       // T * K
  Index first_expert;
  Index num_local_experts;  // L
  Index max_rows;           // negative: no limit
  Index* group_sizes;       // [L]
  Index* dropped;           // [1], number of local slots past max_rows
  Index* slots;             // [R], R = sum of group_sizes; or null
  Index* rows;              // [T * K], row of each slot or -1
};

}  // namespace maxmoe

MAXMOE_KERNEL(ragged_plan, RaggedPlan)
