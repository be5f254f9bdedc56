#pragma once

#include "ops/operator.h"

namespace maxmoe::ops {

inline constexpr Operator<"ragged_scatter_add", Tensor(const Tensor& rows, const Tensor& index, c10::SymInt num_rows,
                                                       int64_t group_size, const OptionalTensor& weights)>
    ragged_scatter_add;

}  // namespace maxmoe::ops
