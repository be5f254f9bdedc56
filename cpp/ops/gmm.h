#pragma once

#include "ops/operator.h"

namespace maxmoe::ops {

inline constexpr Operator<"gmm", Tensor(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes,
                                        const OptionalTensor& bias, int64_t group_offset)>
    gmm;

}  // namespace maxmoe::ops
