#include "ops/grouped_mm.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/cumsum.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/searchsorted.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <cstdint>
#include <limits>

#include "ops/cuda_kernels.h"
#include "ops/torch_internals.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

using torch_internals::grouped_mm;

// Limits of the CUDA kernel of grouped_mm.
constexpr int64_t kAlignment = 16;     // bytes
constexpr int64_t kMostGroups = 1023;  // including one for the rows before the first group

// Whether grouped_mm takes these operands, after `aligned` has copied those with other strides. Otherwise they are
// multiplied group by group, and the host waits for the bounds.
bool is_legal(const Tensor& lhs, const RowGroups& groups) {
  const auto type = lhs.scalar_type();
  const bool is_known = type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  return is_known && groups.size() < kMostGroups && lhs.size(0) <= std::numeric_limits<int32_t>::max();
}

bool is_aligned(const Tensor& t, int64_t elements) {
  return elements * t.element_size() % kAlignment == 0;
}

// The memory of another library, or a part of a tensor, may begin anywhere. Meta tensors have no address.
bool begins_at_multiple_of(int64_t bytes, const Tensor& t) {
  if (t.is_meta()) return t.storage_offset() * t.element_size() % bytes == 0;
  return reinterpret_cast<uintptr_t>(t.const_data_ptr()) % static_cast<uintptr_t>(bytes) == 0;
}

// An operand of products that run group by group. Their bits may depend on its address, which is therefore aligned like
// newly allocated memory.
Tensor at_allocated_address(const Tensor& t) {
  constexpr int64_t kAlignmentOfAllocations = 64;
  return begins_at_multiple_of(kAlignmentOfAllocations, t) ? t : t.clone();
}

// A row-major copy whose rows are padded with zeros to a multiple of `elements`.
Tensor with_zeros_behind_rows(const Tensor& t, int64_t elements) {
  auto sizes = t.sizes().vec();
  sizes.back() = (sizes.back() + elements - 1) / elements * elements;
  const Tensor copy = at::zeros(sizes, t.options()).narrow(-1, 0, t.size(-1));
  return copy.copy_(t);
}

// The rows of a left-hand side [R, D]. For products of bfloat16 on AMX, torch reads rows up to the next multiple of 32
// elements and multiplies what stands behind them by zero: a NaN there would become part of the result.
Tensor left_rows(const Tensor& rows) {
  constexpr int64_t kDepthOfTile = 32;
  const bool may_read_behind = rows.is_cpu() && rows.element_size() == 2 && rows.size(1) % kDepthOfTile != 0;
  return may_read_behind ? with_zeros_behind_rows(rows, kDepthOfTile) : rows;
}

// Whether the matrices are row-major and each row begins at a multiple of 16 bytes.
bool has_aligned_rows(const Tensor& t) {
  const bool is_row_major = t.stride(-1) == 1 && t.stride(-2) >= std::max<int64_t>(1, t.size(-1));
  const bool is_stack_aligned = t.dim() == 2 || is_aligned(t, t.stride(0));
  return is_row_major && is_aligned(t, t.stride(-2)) && is_stack_aligned && begins_at_multiple_of(kAlignment, t);
}

// The rows, or the stack of matrices, if grouped_mm can read them, otherwise a copy. The matrices of a stack may be
// transposed. Rows may not, because the first row of a group could then begin at any address.
Tensor aligned(const Tensor& t) {
  if (has_aligned_rows(t) || (t.dim() == 3 && has_aligned_rows(t.transpose(1, 2)))) return t;
  return with_zeros_behind_rows(t, kAlignment / t.element_size());
}

// One of the matrices [in, out]. values: values_of_codes(matrices)
Tensor matrix_of(const Weights& matrices, int64_t group, at::ScalarType dtype, const Tensor& values) {
  const Weights one = matrices.matrix(group);
  if (!one.is_quantized()) return one.tensor->squeeze(0);
  const Tensor matrix = dequantize_aten(one, dtype, values).squeeze(0);
  return one.is_transposed ? matrix.t() : matrix;
}

// Calls visit(group, first row, number of rows) for each group with rows. Copying the bounds to the host waits for all
// work in the stream of the device.
template <class Visit>
void for_each_group(const RowGroups& groups, const Visit& visit) {
  const Tensor on_host = groups.bounds().both().cpu();
  const auto* const row = on_host.const_data_ptr<int32_t>();
  for (int64_t group = 0; group < groups.size(); ++group) {
    if (row[group + 1] > row[group]) visit(group, row[group], row[group + 1] - row[group]);
  }
}

// From so many rows per group on, a product of torch for each group is expected to be faster than our one kernel for
// all groups, although the host waits for the bounds. Calculated for float16 and an H200, not measured.
constexpr int64_t kManyRowsPerGroup = 256;

// Whether torch has the faster product: of bfloat16 on compute capability 9 and 10, one kernel for all groups; of
// float32 and float16 from 9 on, a product for each group, which a CUDA graph cannot capture.
bool is_faster_in_torch(const CudaKernels& kernels, const Tensor& rows, const RowGroups& groups) {
  const int major = kernels.library->compute_capability(rows.device().index()) / 10;
  const auto type = rows.scalar_type();
  if (type == at::kBFloat16) return major == 9 || major == 10;
  const bool has_many_rows = groups.size() > 0 && rows.size(0) / groups.size() >= kManyRowsPerGroup;
  return type != at::kDouble && major >= 9 && has_many_rows && !kernels.library->is_capturing(kernels.stream);
}

// The CUDA kernels of products, if the one of this name is used.
std::optional<CudaKernels> product_kernels(const Tensor& rows, const RowGroups& groups, const char* kernel) {
  const auto kernels = cuda_kernels(rows, kernel);
  return kernels.has_value() && is_faster_in_torch(*kernels, rows, groups) ? std::nullopt : kernels;
}

Tensor gmm_cuda(const CudaKernels& kernels, const Tensor& rows, const Projection& given, const RowGroups& groups) {
  const Projection matrices = given.in_kernel_layout();
  const Tensor out = at::empty({rows.size(0), matrices.out_size()}, rows.options());
  for_dtype(rows.scalar_type(), [&]<class T>() {
    kernels.rows<T>().gmm({Rows(rows), nullptr, const_stack<T>(*matrices.tensor),
                           matrices.bias.has_value() ? const_view<T>(*matrices.bias) : ConstMatrixView<T>{},
                           List(groups.sizes()), groups.sizes().numel(), groups.offset(), view<T>(out)},
                          kernels.stream);
  });
  return out;
}

Tensor tgmm_cuda(const CudaKernels& kernels, const Tensor& lhs, const Tensor& rhs, const RowGroups& groups) {
  const Tensor out = at::empty({groups.size(), lhs.size(1), rhs.size(1)}, lhs.options());
  for_dtype(lhs.scalar_type(), [&]<class T>() {
    kernels.rows<T>().tgmm(
        {Rows(lhs), Rows(rhs), List(groups.sizes()), groups.sizes().numel(), groups.offset(), stack<T>(out)},
        kernels.stream);
  });
  return out;
}

GroupBounds bounds_of(const Tensor& group_sizes, int64_t group_offset, int64_t num_local_groups) {
  const int64_t num_groups = group_sizes.size(0);
  // Stays on the device; int32 is what grouped_mm reads.
  const Tensor ends = group_sizes.cumsum(0, at::kInt);
  if (group_offset == 0 && num_local_groups <= num_groups) return {ends.narrow(0, 0, num_local_groups), {}};
  const Tensor bounds = at::constant_pad_nd(ends, {1, 0});
  const int64_t first = std::clamp<int64_t>(group_offset, 0, num_groups);
  const int64_t last = std::clamp<int64_t>(group_offset + num_local_groups, 0, num_groups);
  // An empty group begins and ends where its neighbour begins or ends.
  const int64_t num_before = std::clamp<int64_t>(-group_offset, 0, num_local_groups);
  const int64_t num_after = num_local_groups - (last - first) - num_before;
  return {at::cat({bounds.narrow(0, first, 1).expand({num_before}), bounds.narrow(0, first + 1, last - first),
                   bounds.narrow(0, last, 1).expand({num_after})}),
          first == 0 ? Tensor() : bounds.narrow(0, first, 1)};
}

}  // namespace

Tensor GroupBounds::both() const {
  return begin.defined() ? at::cat({begin, ends}) : at::constant_pad_nd(ends, {1, 0});
}

const GroupBounds& RowGroups::bounds() const {
  if (!bounds_.has_value()) bounds_ = bounds_of(sizes_, offset_, count_);
  return *bounds_;
}

Tensor RowGroups::of_rows(int64_t num_rows) const {
  const Tensor& ends = bounds().ends;
  const Tensor position = at::arange(num_rows, ends.options());
  return at::searchsorted(ends, position, /*out_int32=*/false, /*right=*/true).clamp_max_(size() - 1);
}

Tensor RowGroups::rows_of_no_group(int64_t num_rows) const {
  if (size() == 0) return at::ones({num_rows, 1}, sizes_.options().dtype(at::kBool));
  const auto& [ends, begin] = bounds();
  const Tensor position = at::arange(num_rows, ends.options()).unsqueeze(1);
  const Tensor is_after = position.ge(ends.select(0, size() - 1));
  return begin.defined() ? position.lt(begin).logical_or_(is_after) : is_after;
}

bool runs_gmm_kernel(const Tensor& rows, const Weights& matrices, const RowGroups& groups) {
  return !matrices.is_quantized() && product_kernels(rows, groups, "gmm").has_value();
}

Tensor multiply_rows(const Tensor& rows, const Projection& matrices, const RowGroups& groups) {
  if (runs_gmm_kernel(rows, matrices, groups))
    return gmm_cuda(*product_kernels(rows, groups, "gmm"), rows, matrices, groups);
  Tensor out;
  if (rows.numel() == 0 || matrices.count() == 0 || matrices.out_size() == 0) {
    out = at::zeros({rows.size(0), matrices.out_size()}, rows.options());
  } else if (!matrices.is_quantized() && is_legal(rows, groups)) {
    // grouped_mm takes only the ends of groups, so that rows before the first group count as its rows. Their results
    // may be undefined.
    out = grouped_mm(aligned(left_rows(rows)), aligned(*matrices.tensor), groups.bounds().ends).contiguous();
  } else {
    out = at::empty({rows.size(0), matrices.out_size()}, rows.options());
    const Tensor values = values_of_codes(matrices);
    const Tensor left = at_allocated_address(left_rows(rows));
    for_each_group(groups, [&](int64_t group, int64_t row, int64_t count) {
      const Tensor matrix = matrix_of(matrices, group, rows.scalar_type(), values);
      out.narrow(0, row, count).copy_(at::mm(left.narrow(0, row, count), matrix));
    });
  }
  if (matrices.bias.has_value() && groups.size() > 0)
    out.add_(matrices.bias->index_select(0, groups.of_rows(rows.size(0))));
  return out;
}

Tensor multiply_groups(const Tensor& lhs, const Tensor& rhs, const RowGroups& groups) {
  if (groups.size() == 0 || lhs.numel() == 0 || rhs.numel() == 0) {
    return at::zeros({groups.size(), lhs.size(1), rhs.size(1)}, lhs.options());
  }
  if (const auto kernels = product_kernels(lhs, groups, "tgmm")) return tgmm_cuda(*kernels, lhs, rhs, groups);
  if (is_legal(lhs, groups)) {
    const GroupBounds& bounds = groups.bounds();
    const Tensor left = aligned(lhs).t();
    const Tensor right = aligned(rhs);
    if (!bounds.begin.defined()) return grouped_mm(left, right, bounds.ends).contiguous();
    // The rows before the first group form an additional group, whose product is dropped.
    return grouped_mm(left, right, bounds.both()).narrow(0, 1, groups.size()).contiguous();
  }
  const Tensor out = at::zeros({groups.size(), lhs.size(1), rhs.size(1)}, lhs.options());
  const Tensor left = at_allocated_address(lhs);
  const Tensor right = at_allocated_address(rhs);
  for_each_group(groups, [&](int64_t group, int64_t row, int64_t count) {
    out.select(0, group).copy_(at::mm(left.narrow(0, row, count).t(), right.narrow(0, row, count)));
  });
  return out;
}

}  // namespace maxmoe::ops
