#pragma once

#include "ops/operator.h"

namespace maxmoe::ops {

inline constexpr Operator<"ragged_gather", Tensor(const Tensor& x, const Tensor& index, const OptionalTensor& weights,
                                                  c10::SymInt start, std::optional<c10::SymInt> end)>
    ragged_gather;

}  // namespace maxmoe::ops
