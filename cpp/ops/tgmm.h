#pragma once

#include <ATen/core/Tensor.h>

namespace maxmoe::ops {

at::Tensor tgmm(const at::Tensor& lhs, const at::Tensor& rhs, const at::Tensor& group_sizes, int64_t num_local_groups,
                int64_t group_offset);

}  // namespace maxmoe::ops
