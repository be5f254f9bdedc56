#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace maxmoe::ops {

at::Tensor ragged_sort(const at::Tensor& x, const at::Tensor& slots, const at::Tensor& rows, int64_t top_k,
                       const std::optional<at::Tensor>& weights);

}  // namespace maxmoe::ops
