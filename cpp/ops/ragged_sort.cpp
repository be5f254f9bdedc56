#include "kernels/rows/ragged_sort.h"
#include "ops/backend.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/registration.h"
#include "ops/row_sums.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// On other devices than the CPU. Rows of no slot (-1) have token -1, and are zero.
Tensor ragged_sort_device(const Tensor& x, const Tensor& slots, int64_t top_k, const OptionalTensor& weights) {
  OptionalTensor of_rows;
  if (weights.has_value()) of_rows = weights->reshape(-1).index_select(0, slots.clamp_min(0));
  return selected_rows_or_zeros(x, slots.div(top_k, "floor"), of_rows);
}

Tensor ragged_sort_backend(const Tensor& x, const Tensor& slots, const Tensor& rows, int64_t top_k,
                           const OptionalTensor& weights) {
  constexpr const char* kOp = "ragged_sort";
  Argument(kOp, "x", x).has_dims(2, "[T, D]").is_floating();
  check_weights(kOp, weights, rows.numel());
  check_routed_rows(kOp, slots, rows, x.size(0), slots.numel(), top_k);
  if (!uses_kernels(x)) return ragged_sort_device(x, slots, top_k, weights);
  const Tensor out = empty({slots.size(0), x.size(1)}, x.options());
  const List factors(accumulator_weights(weights, x.scalar_type()));
  for_dtype(x.scalar_type(), [&]<class T>() {
    maxmoe::ragged_sort(RaggedSort<T>{Rows(x), List(slots), top_k, factors, view<T>(out)}, torch_executor());
  });
  return out;
}

variable_list ragged_sort_backward(WantedGradients wanted, const Tensor& grad, const Tensor& x, const Tensor& slots,
                                   const Tensor& rows, int64_t top_k, const OptionalTensor& weights) {
  return {wanted[0] ? ragged_unsort(grad, slots, rows, top_k, weights) : Tensor(), Tensor(), Tensor(), Tensor(),
          wanted[4] ? like_weights(ragged_dot(x, grad, rows, top_k), *weights) : Tensor()};
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<ragged_sort, ragged_sort_backend, Recorded<ragged_sort, ragged_sort_backward>>(
      library, "ragged_sort(Tensor x, Tensor slots, Tensor rows, int top_k, Tensor? weights=None) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
