#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace maxmoe::ops {

at::Tensor ragged_gather(const at::Tensor& x, const at::Tensor& index, const std::optional<at::Tensor>& weights,
                         c10::SymInt start, std::optional<c10::SymInt> end);

}  // namespace maxmoe::ops
