#pragma once

#include <ATen/core/Tensor.h>

namespace maxmoe::ops {

at::Tensor ragged_dot(const at::Tensor& a, const at::Tensor& b, const at::Tensor& index, int64_t group_size);

}  // namespace maxmoe::ops
