// The products of groups of rows through ATen, for devices without kernels of their own. docs/devices.md says what runs
// when.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace maxmoe::ops {

// Where the rows of L groups lie: int32 [L + 1] on the device, the begin of the first one and the end of each.
struct RowGroups {
  at::Tensor bounds;
  bool begin_at_zero;  // for certain

  int64_t size() const { return bounds.size(0) - 1; }
  at::Tensor ends() const { return bounds.narrow(0, 1, size()); }
  // For each of num_rows rows its group; any of them for a row of no group.
  at::Tensor of_rows(int64_t num_rows) const;
  // bool [num_rows, 1], true for the rows of no group.
  at::Tensor have_not(int64_t num_rows) const;
};

// Those of [group_offset, group_offset + num_local_groups) among the groups of these sizes; outside of them they are
// empty.
RowGroups row_groups(const at::Tensor& group_sizes, int64_t group_offset, int64_t num_local_groups);

// [R, F]: rows [R, D] times the matrices [L, D, F] of their groups, plus the biases [L, F]. What is in the rows of no
// group is not defined.
at::Tensor multiply_rows(const at::Tensor& rows, const at::Tensor& matrices, const RowGroups& groups,
                         const std::optional<at::Tensor>& biases);

// [L, D, F]: for each group, its rows of lhs [R, D], transposed, times its rows of rhs [R, F].
at::Tensor multiply_groups(const at::Tensor& lhs, const at::Tensor& rhs, const RowGroups& groups);

}  // namespace maxmoe::ops
