#pragma once

#include "ops/operator.h"

namespace maxmoe::ops {

inline constexpr Operator<"ragged_unsort", Tensor(const Tensor& rows, const Tensor& slots, const Tensor& row_of_slot,
                                                  int64_t top_k, const OptionalTensor& weights)>
    ragged_unsort;

}  // namespace maxmoe::ops
