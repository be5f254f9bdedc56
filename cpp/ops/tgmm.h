#pragma once

#include "ops/operator.h"

namespace maxmoe::ops {

inline constexpr Operator<"tgmm", Tensor(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes,
                                         int64_t num_local_groups, int64_t group_offset)>
    tgmm;

}  // namespace maxmoe::ops
