#pragma once

#include "ops/operator.h"

namespace maxmoe::ops {

inline constexpr Operator<"ragged_gather_reduce", Tensor(const Tensor& rows, const Tensor& index, int64_t group_size,
                                                         const OptionalTensor& weights, const OptionalTensor& valid)>
    ragged_gather_reduce;

}  // namespace maxmoe::ops
