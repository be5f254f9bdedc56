#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace maxmoe::ops {

at::Tensor ragged_gather_reduce(const at::Tensor& rows, const at::Tensor& index, int64_t group_size,
                                const std::optional<at::Tensor>& weights, const std::optional<at::Tensor>& valid);

}  // namespace maxmoe::ops
