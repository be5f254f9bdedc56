#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace maxmoe::ops {

at::Tensor ragged_unsort(const at::Tensor& rows, const at::Tensor& slots, const at::Tensor& row_of_slot, int64_t top_k,
                         const std::optional<at::Tensor>& weights);

}  // namespace maxmoe::ops
