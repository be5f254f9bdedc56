#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace maxmoe::ops {

at::Tensor gmm(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& group_sizes,
               const std::optional<at::Tensor>& bias, int64_t group_offset);

}  // namespace maxmoe::ops
