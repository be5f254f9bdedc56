// The operator dequantize, which others call.
#pragma once

#include "ops/operator.h"

namespace maxmoe::ops {

inline constexpr Operator<"dequantize", Tensor(const Tensor& codes, const Tensor& scales, const OptionalTensor& zeros,
                                               std::string_view format, int64_t columns, at::ScalarType dtype)>
    dequantize;

}  // namespace maxmoe::ops
