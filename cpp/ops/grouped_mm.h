// Products of groups of rows through CUDA kernels or ATen, for all devices but the CPU. docs/devices.md says which
// function runs for which tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "ops/projection.h"

namespace maxmoe::ops {

// The rows of L contiguous groups: group g begins where group g - 1 ends. Rows before the first group and after the
// last one belong to no group.
struct GroupBounds {
  at::Tensor ends;   // int32 [L], on the device
  at::Tensor begin;  // int32 [1], on the device: the first row of the first group; undefined if it is row 0

  at::Tensor both() const;  // int32 [L + 1]: begin and ends
};

// The groups [offset, offset + L) out of the G groups of sizes [G]. Groups before the first or after the last of the G
// are empty.
class RowGroups {
 public:
  RowGroups(const at::Tensor& sizes, int64_t offset, int64_t count) : sizes_(sizes), offset_(offset), count_(count) {}

  int64_t size() const { return count_; }
  const at::Tensor& sizes() const { return sizes_; }
  int64_t offset() const { return offset_; }
  // Computed at the first call: CUDA kernels read the sizes alone.
  const GroupBounds& bounds() const;
  // int64 [num_rows]: the group of each row; an arbitrary group for a row of no group.
  at::Tensor of_rows(int64_t num_rows) const;
  // bool [num_rows, 1]: true for the rows of no group.
  at::Tensor rows_of_no_group(int64_t num_rows) const;

 private:
  at::Tensor sizes_;
  int64_t offset_;
  int64_t count_;
  mutable std::optional<GroupBounds> bounds_;
};

// Whether multiply_rows runs the CUDA kernel gmm, which writes zeros to rows of no group: for tensors that use CUDA
// kernels, unless the matrices are quantized or torch has a faster one.
bool runs_gmm_kernel(const at::Tensor& rows, const Weights& matrices, const RowGroups& groups);

// [R, F]: rows [R, D] times the matrices [L, D, F] of their groups, plus the biases [L, F]; without low-rank factors.
// Through ATen the values of rows of no group are undefined. Quantized matrices are dequantized one by one, for which
// the host waits for the bounds.
at::Tensor multiply_rows(const at::Tensor& rows, const Projection& matrices, const RowGroups& groups);

// [L, D, F]: for each group, its rows of lhs [R, D], transposed, times its rows of rhs [R, F].
at::Tensor multiply_groups(const at::Tensor& lhs, const at::Tensor& rhs, const RowGroups& groups);

}  // namespace maxmoe::ops
