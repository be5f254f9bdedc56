// Rows that are selected by an index, and their sums, each times a weight.
#pragma once

#include <functional>
#include <initializer_list>
#include <optional>

#include "ops/checks.h"

namespace maxmoe::ops {

// The kernels ragged_gather and ragged_gather_reduce, of the CPU or of CUDA. The arguments have been checked.
Tensor gather_rows(const Tensor& x, const Tensor& index, const OptionalTensor& weights, int64_t start, int64_t end);
Tensor sum_rows(const Tensor& rows, const Tensor& index, int64_t group_size, const OptionalTensor& weights,
                const OptionalTensor& valid);

// The rows [M, D] of an index [M], which has no negative numbers, each times its weight [M], if there are weights: for
// 16-bit rows in float32, rounded once. Through a CUDA kernel or ATen.
Tensor selected_rows(const Tensor& rows, const Tensor& index, const OptionalTensor& weights = std::nullopt);

// The same for an index with negative numbers, whose rows are zero. Also for tensors without rows.
Tensor selected_rows_or_zeros(const Tensor& rows, const Tensor& index, const OptionalTensor& weights = std::nullopt);

// For each group of slots, the sum of their rows, each times the weight of its slot: [number of groups, D], of one or
// two `tensors` [R, D], which functions compute. index [M]: the row of each slot, negative for none. weights: one for
// each slot, or None. dtype: the dtype of the rows.
//
// A kernel reads each row once and adds in the order of the index, for 16-bit rows in float32; no tensor of the
// selected rows is allocated. On CUDA one kernel sums both tensors. Through ATen each tensor is computed just before it
// is added, so that one at a time is in memory.
Tensor sums_of_groups(const Tensor& index, int64_t group_size, const OptionalTensor& weights, at::ScalarType dtype,
                      std::initializer_list<std::function<Tensor()>> tensors);

}  // namespace maxmoe::ops
