// Checks of a plan's tensors, for the operators that take one.
#pragma once

#include "ops/backend.h"
#include "ops/checks.h"

namespace maxmoe::ops {

// slots [R] in [0, T * K), through ATen -1 too, and row_of_slot [T * K] in [-1, R). The plan's own consistency beyond
// that is not checked: a wrong one gives wrong rows, never a read out of bounds.
inline void check_routed_rows(const char* op, const Tensor& slots, const Tensor& row_of_slot, int64_t num_tokens,
                              int64_t num_rows, int64_t top_k) {
  MAXMOE_CHECK(top_k >= 1, op, "top_k must be at least 1, got ", top_k);
  Argument(op, "plan.slots", slots).has_dims(1, "[R]").is_int64();
  Argument(op, "plan.rows", row_of_slot).has_dims(1, "[T * K]").is_int64();
  const int64_t num_slots = checked_product(op, "top_k", num_tokens, top_k);
  Argument(op, "plan.rows", row_of_slot).has_size(0, num_slots, "T * K");
  Argument(op, "plan.slots", slots).has_values_in(uses_kernels(slots) ? 0 : -1, num_slots, "a slot of T * K");
  Argument(op, "plan.rows", row_of_slot).has_values_in(-1, num_rows, "-1 or one of R rows");
}

}  // namespace maxmoe::ops
