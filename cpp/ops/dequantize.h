// The operator dequantize, which others call, and its implementation through ATen.
#pragma once

#include "ops/operator.h"
#include "ops/weights.h"

namespace maxmoe::ops {

inline constexpr Operator<"dequantize", Tensor(const Tensor& codes, const Tensor& scales, const OptionalTensor& zeros,
                                               std::string_view format, int64_t columns, at::ScalarType dtype)>
    dequantize;

// The values [16] of codes of 4 bits, on the device of the codes; undefined for other formats and for a tensor. The
// values reach the device as arguments of kernels, because a copy from the host would wait for the device.
Tensor values_of_codes(const Weights& weights);

// The operator through ATen. [L, rows, columns]
Tensor dequantize_aten(const Weights& weights, at::ScalarType dtype, const Tensor& values);

}  // namespace maxmoe::ops
