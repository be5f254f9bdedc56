#pragma once

#include "ops/operator.h"

namespace maxmoe::ops {

inline constexpr Operator<"ragged_sort", Tensor(const Tensor& x, const Tensor& slots, const Tensor& rows, int64_t top_k,
                                                const OptionalTensor& weights)>
    ragged_sort;

}  // namespace maxmoe::ops
