// embedding_bag multiplies rows by numbers of their dtype. A float32 weight of 16-bit rows is written as the sum of two
// such numbers, and the row is added twice: together they have twice the digits.
#include "ops/row_sums.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/embedding_bag.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/sub.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "kernels/rows/ragged_gather.h"
#include "kernels/rows/ragged_gather_reduce.h"
#include "ops/backend.h"
#include "ops/cuda_kernels.h"
#include "ops/memory.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// [..., 1], or [..., 2] for 16-bit types: numbers of a type, whose sum is each of the weights.
Tensor split(const Tensor& weights, at::ScalarType dtype) {
  const Tensor wide = weights.to(accumulator_type(dtype));
  if (wide.scalar_type() == dtype) return wide.unsqueeze(-1);
  auto sizes = wide.sizes().vec();
  sizes.push_back(2);
  const Tensor parts = at::empty(sizes, wide.options().dtype(dtype));
  const Tensor high = parts.select(-1, 0);
  Tensor low = parts.select(-1, 1);
  high.copy_(wide);
  at::sub_out(low, wide, high);
  return parts;
}

Tensor sum_rows_of_two(const CudaKernels& kernels, const Tensor& rows, const Tensor& others, const Tensor& index,
                       int64_t group_size, const OptionalTensor& weights) {
  const Tensor out = at::empty({index.size(0) / group_size, rows.size(1)}, rows.options());
  const List factors(accumulator_weights(weights, rows.scalar_type()));
  for_dtype(rows.scalar_type(), [&]<class T>() {
    kernels.rows<T>().ragged_gather_reduce_of_two(
        {{Rows(rows), List(index), group_size, factors, /*valid=*/nullptr, view<T>(out)}, Rows(others)},
        kernels.stream);
  });
  return out;
}

}  // namespace

Tensor gather_rows(const Tensor& x, const Tensor& index, const OptionalTensor& weights, int64_t start, int64_t end) {
  const Tensor out = empty({index.size(0), x.size(1)}, x.options());
  const List factors(accumulator_weights(weights, x.scalar_type()));
  for_dtype(x.scalar_type(), [&]<class T>() {
    run(cuda_kernels(x, "ragged_gather"), &cuda::RowKernels<T>::ragged_gather, maxmoe::ragged_gather<T>,
        {Rows(x), List(index), factors, start, end, view<T>(out)});
  });
  return out;
}

Tensor sum_rows(const Tensor& rows, const Tensor& index, int64_t group_size, const OptionalTensor& weights,
                const OptionalTensor& valid) {
  const Tensor out = empty({index.size(0) / group_size, rows.size(1)}, rows.options());
  const List factors(accumulator_weights(weights, rows.scalar_type()));
  for_dtype(rows.scalar_type(), [&]<class T>() {
    run(cuda_kernels(rows, "ragged_gather_reduce"), &cuda::RowKernels<T>::ragged_gather_reduce,
        maxmoe::ragged_gather_reduce<T>, {Rows(rows), List(index), group_size, factors, List(valid), view<T>(out)});
  });
  return out;
}

// With weights ATen takes two kernels here; the single kernel of embedding_bag takes 2.6 times as long (H200, 2048 to
// 4096 columns).
Tensor selected_rows(const Tensor& rows, const Tensor& index, const OptionalTensor& weights) {
  if (path_of(rows, "ragged_gather") == Path::cuda_kernels) return gather_rows(rows, index, weights, 0, index.size(0));
  const Tensor selected = rows.index_select(0, index);
  if (!weights.has_value()) return selected;
  return selected.mul_(weights->reshape(-1).to(accumulator_type(rows.scalar_type())).unsqueeze(1));
}

Tensor selected_rows_or_zeros(const Tensor& rows, const Tensor& index, const OptionalTensor& weights) {
  if (rows.size(0) == 0) return at::zeros({index.size(0), rows.size(1)}, rows.options());
  // The kernel writes the zeros.
  if (path_of(rows, "ragged_gather") == Path::cuda_kernels) return selected_rows(rows, index, weights);
  return selected_rows(rows, index.clamp_min(0), weights).masked_fill_(index.lt(0).unsqueeze(1), 0);
}

// embedding_bag reads a row for every term. A slot without a row takes another row of its group, with weight 0: an
// arbitrary row may be infinite or, if it is padding, undefined. A group without any row reads the first one, and its
// sum is overwritten.
Tensor sums_of_groups(const Tensor& index, int64_t group_size, const OptionalTensor& weights, at::ScalarType dtype,
                      std::initializer_list<std::function<Tensor()>> tensors) {
  if (const auto kernels = cuda_kernels(index, "ragged_gather_reduce")) {
    const Tensor first = (*tensors.begin())();
    if (tensors.size() == 1) return sum_rows(first, index, group_size, weights, std::nullopt);
    return sum_rows_of_two(*kernels, first, (*std::next(tensors.begin()))(), index, group_size, weights);
  }
  const int64_t num_groups = index.size(0) / group_size;
  const Tensor rows = index.reshape({num_groups, group_size});
  const Tensor is_absent = rows.lt(0);
  const Tensor other = rows.amax(1, /*keepdim=*/true);
  const Tensor factors = weights.has_value() ? split(weights->reshape(rows.sizes()).masked_fill(is_absent, 0), dtype)
                                             : is_absent.logical_not().to(dtype).unsqueeze(2);
  const Tensor row_of_term =
      at::where(is_absent.unsqueeze(2).expand(factors.sizes()), other.clamp_min(0).unsqueeze(2), rows.unsqueeze(2));
  const Tensor begins = at::arange(0, factors.numel(), factors.size(1) * factors.size(2), index.options());
  const auto sums_of = [&](const Tensor& tensor) {
    if (num_groups == 0 || tensor.numel() == 0) return at::zeros({num_groups, tensor.size(1)}, tensor.options());
    constexpr int64_t kSum = 0;
    return std::get<0>(at::embedding_bag(tensor.contiguous(), row_of_term.reshape(-1), begins,
                                         /*scale_grad_by_freq=*/false, kSum, /*sparse=*/false, factors.reshape(-1)));
  };
  Tensor sums;
  for (const auto& make_tensor : tensors) {
    const Tensor terms = sums_of(make_tensor());
    sums = sums.defined() ? sums.add_(terms) : terms;
  }
  return sums.masked_fill_(other.lt(0), 0);
}

}  // namespace maxmoe::ops
