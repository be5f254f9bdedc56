#pragma once

#include "ops/operator.h"

namespace maxmoe::ops {

inline constexpr Operator<"linear", Tensor(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                           std::optional<at::ScalarType> out_dtype)>
    linear;

}  // namespace maxmoe::ops
