#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace maxmoe::ops {

at::Tensor ragged_scatter_add(const at::Tensor& rows, const at::Tensor& index, c10::SymInt num_rows, int64_t group_size,
                              const std::optional<at::Tensor>& weights);

}  // namespace maxmoe::ops
