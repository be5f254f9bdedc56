#pragma once

#include "ops/operator.h"

namespace maxmoe::ops {

inline constexpr Operator<"mm", Tensor(const Tensor& a, const Tensor& b, const OptionalTensor& bias,
                                       std::optional<at::ScalarType> out_dtype)>
    mm;

}  // namespace maxmoe::ops
