#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "kernels/rows/ragged_scatter_add.h"
#include "ops/backend.h"
#include "ops/cuda_kernels.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/registration.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// Slots without a row are added to one row past the result, which is sliced off. A loop over the slots of a group, so
// that no tensor of [M, D] is allocated.
Tensor ragged_scatter_add_aten(const Tensor& rows, const Tensor& index, int64_t num_rows, int64_t group_size,
                               const OptionalTensor& weights) {
  const auto type = accumulator_type(rows.scalar_type());
  if (index.size(0) == 0) return at::zeros({num_rows, rows.size(1)}, rows.options());
  const Tensor out = at::zeros({num_rows + 1, rows.size(1)}, rows.options().dtype(type));
  const Tensor target = index.masked_fill(index.lt(0), num_rows).reshape({rows.size(0), group_size});
  const Tensor source = rows.to(type);
  Tensor scale;
  if (weights.has_value()) scale = weights->reshape({rows.size(0), group_size}).to(type);
  for (int64_t slot = 0; slot < group_size; ++slot) {
    const Tensor added = scale.defined() ? source * scale.select(1, slot).unsqueeze(1) : source;
    // On CUDA, index_add_ adds by atomic operations, which gives other bits in each run; this sorts the index.
    out.index_put_({target.select(1, slot)}, added, /*accumulate=*/true);
  }
  return out.narrow(0, 0, num_rows).to(rows.scalar_type());
}

Tensor ragged_scatter_add_backend(const Tensor& rows, const Tensor& index, int64_t num_rows, int64_t group_size,
                                  const OptionalTensor& weights) {
  constexpr const char* kOp = "ragged_scatter_add";
  Argument(kOp, "rows", rows).has_dims(2, "[M / group_size, D]").is_floating();
  MAXMOE_CHECK(0 <= num_rows && num_rows < kLongestList, kOp, "num_rows must not be negative and less than ",
               kLongestList, ", got ", num_rows);
  check_group_size(kOp, group_size);
  Argument(kOp, "index", index)
      .has_dims(1, "[M]")
      .is_int64()
      .has_size(0, checked_product(kOp, "group_size", rows.size(0), group_size), "rows times group_size");
  check_weights(kOp, weights, index.size(0));
  Argument(kOp, "index", index).has_values_in(-1, num_rows, "-1 or a row of the result", kOp);
  if (path_of(rows, kOp) == Path::aten) return ragged_scatter_add_aten(rows, index, num_rows, group_size, weights);
  const Tensor out = empty({num_rows, rows.size(1)}, rows.options());
  if (out.numel() == 0) return out;
  const List factors(accumulator_weights(weights, rows.scalar_type()));
  // Work space: the kernels invert the index first, so that each row of the result is summed by one thread in the order
  // of the index. Atomic additions would give other bits in each run.
  const auto kernels = cuda_kernels(rows, kOp);
  const int64_t scratch_size = kernels.has_value()
                                   ? kernels->library->ragged_scatter_add_scratch(index.numel(), num_rows)
                                   : num_rows + 1 + index.numel();
  const Tensor scratch = at::empty({scratch_size}, index.options());
  for_dtype(rows.scalar_type(), [&]<class T>() {
    run(kernels, &cuda::RowKernels<T>::ragged_scatter_add, maxmoe::ragged_scatter_add<T>,
        {Rows(rows), List(index), index.numel(), group_size, factors, pointer<int64_t>(scratch), view<T>(out)});
  });
  return out;
}

variable_list ragged_scatter_add_backward(WantedGradients wanted, const Tensor& grad, const Tensor& rows,
                                          const Tensor& index, const c10::SymInt& /*num_rows*/, int64_t group_size,
                                          const OptionalTensor& weights) {
  return {wanted[0] ? ragged_gather_reduce(grad, index, group_size, weights, std::nullopt) : Tensor(), Tensor(),
          Tensor(), Tensor(), wanted[4] ? like_weights(ragged_dot(rows, grad, index, group_size), *weights) : Tensor()};
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<ragged_scatter_add, ragged_scatter_add_backend, Recorded<ragged_scatter_add, ragged_scatter_add_backward>>(
      library,
      "ragged_scatter_add(Tensor rows, Tensor index, SymInt num_rows, int group_size=1, Tensor? weights=None) "
      "-> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
