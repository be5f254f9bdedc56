#include "kernels/rows/ragged_sort.h"
#include "ops/backend.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/row_sums.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

OptionalTensor weights_of(const Tensor& slots, const OptionalTensor& weights) {
  return weights.has_value() ? OptionalTensor(weights->reshape(-1).index_select(0, slots)) : std::nullopt;
}

// Rows of no slot (-1) are zero.
Tensor ragged_sort_aten(const Tensor& x, const Tensor& slots, int64_t top_k, const OptionalTensor& weights) {
  const Tensor is_absent = slots.lt(0).unsqueeze(1);
  const Tensor slot = slots.clamp_min(0);
  return selected_rows(x, slot.div(top_k, "floor"), weights_of(slot, weights)).masked_fill_(is_absent, 0);
}

// The kernel writes zeros for a token of -1.
Tensor ragged_sort_cuda(const Tensor& x, const Tensor& slots, int64_t top_k, const OptionalTensor& weights) {
  return selected_rows(x, slots.div(top_k, "floor"), weights_of(slots.clamp_min(0), weights));
}

Tensor ragged_sort_backend(const Tensor& x, const Tensor& slots, const Tensor& rows, int64_t top_k,
                           const OptionalTensor& weights) {
  constexpr const char* kOp = "ragged_sort";
  Argument(kOp, "x", x).has_dims(2, "[T, D]").is_floating();
  check_weights(kOp, weights, rows.numel());
  check_routed_rows(kOp, slots, rows, x.size(0), slots.numel(), top_k);
  const Path path = path_of(x);
  if (path == Path::cuda_kernels) return ragged_sort_cuda(x, slots, top_k, weights);
  if (path == Path::aten) return ragged_sort_aten(x, slots, top_k, weights);
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
  ragged_sort.define<ragged_sort_backend, Recorded<ragged_sort, ragged_sort_backward>>(
      library, "ragged_sort(Tensor x, Tensor slots, Tensor rows, int top_k, Tensor? weights=None) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
