#pragma once

#include "ops/operator.h"

namespace maxmoe::ops {

inline constexpr Operator<"ragged_dot",
                          Tensor(const Tensor& a, const Tensor& b, const Tensor& index, int64_t group_size)>
    ragged_dot;

}  // namespace maxmoe::ops
