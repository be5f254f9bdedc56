// Products of groups of rows through ATen, for devices without kernels. docs/devices.md says which function of ATen
// runs for which tensors.
#pragma once

#include <ATen/core/Tensor.h>

#include "ops/projection.h"

namespace maxmoe::ops {

// The rows of L contiguous groups: group g begins where group g - 1 ends. Rows before the first group and after the
// last one belong to no group.
struct RowGroups {
  at::Tensor ends;   // int32 [L], on the device
  at::Tensor begin;  // int32 [1], on the device: the first row of the first group; undefined if it is row 0

  int64_t size() const { return ends.size(0); }
  at::Tensor bounds() const;  // int32 [L + 1]: begin and ends
  // int64 [num_rows]: the group of each row; an arbitrary group for a row of no group.
  at::Tensor of_rows(int64_t num_rows) const;
  // bool [num_rows, 1]: true for the rows of no group.
  at::Tensor rows_of_no_group(int64_t num_rows) const;
};

// The groups [group_offset, group_offset + num_local_groups) out of the G groups of group_sizes [G]. Groups before the
// first or after the last of the G are empty.
RowGroups row_groups(const at::Tensor& group_sizes, int64_t group_offset, int64_t num_local_groups);

// [R, F]: rows [R, D] times the matrices [L, D, F] of their groups, plus the biases [L, F]; without low-rank factors.
// The values of rows of no group are undefined. Quantized matrices are dequantized one by one, for which the host waits
// for the bounds.
at::Tensor multiply_rows(const at::Tensor& rows, const Projection& matrices, const RowGroups& groups);

// [L, D, F]: for each group, its rows of lhs [R, D], transposed, times its rows of rhs [R, F].
at::Tensor multiply_groups(const at::Tensor& lhs, const at::Tensor& rhs, const RowGroups& groups);

}  // namespace maxmoe::ops
