// Assigns rows to routed slots, grouped by expert. Integers only.
#pragma once

#include "executor.h"

namespace maxmoe {

// The slots (t * K + k) whose expert is local, ordered by expert, then slot; at most max_rows of them. Call twice, as R
// is not known before the first call: with `slots` null it fills group_sizes and dropped, with `slots` of [R] the
// second one fills slots and rows.
template <class Index>
struct RaggedPlan {
  const Index* experts;  // [T * K], each in [-1, num_experts); -1 is a slot without an expert
  Index num_slots;       // T * K
  Index first_expert;
  Index num_local_experts;  // L
  Index max_rows;           // negative: no limit
  Index* group_sizes;       // [L]
  Index* dropped;           // 1, local slots past max_rows
  Index* slots;             // [R], R = sum of group_sizes; or null
  Index* rows;              // [T * K], row of each slot or -1
};

}  // namespace maxmoe

MAXMOE_KERNEL(ragged_plan, RaggedPlan)
