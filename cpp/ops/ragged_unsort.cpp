// The K slots of a token are contiguous, so that ragged_gather_reduce sums their rows.
#include "ops/backend.h"
#include "ops/operators.h"
#include "ops/registration.h"
#include "ops/row_sums.h"

namespace maxmoe::ops {
namespace {

Tensor ragged_unsort_backend(const Tensor& rows, const Tensor& slots, const Tensor& row_of_slot, int64_t top_k,
                             const OptionalTensor& weights) {
  constexpr const char* kOp = "ragged_unsort";
  Argument(kOp, "rows", rows).has_dims(2, "[R, D]").is_floating();
  MAXMOE_CHECK(top_k >= 1, kOp, "top_k must be at least 1, got ", top_k);
  MAXMOE_CHECK(row_of_slot.numel() % top_k == 0, kOp, "top_k must divide the slots of the plan (", row_of_slot.numel(),
               "), got ", top_k);
  MAXMOE_CHECK(rows.size(0) >= slots.numel(), kOp, "rows must have a row for each of the plan's ", slots.numel(),
               ", got shape ", rows.sizes());
  check_weights(kOp, weights, row_of_slot.numel());
  check_routed_rows(kOp, slots, row_of_slot, row_of_slot.numel() / top_k, slots.numel(), top_k);
  if (!uses_kernels(rows)) return ragged_gather_reduce(rows, row_of_slot, top_k, weights, std::nullopt);
  return sum_rows(rows, row_of_slot, top_k, weights, std::nullopt);
}

variable_list ragged_unsort_backward(WantedGradients wanted, const Tensor& grad, const Tensor& rows,
                                     const Tensor& slots, const Tensor& row_of_slot, int64_t top_k,
                                     const OptionalTensor& weights) {
  variable_list gradients(5);
  if (wanted[0]) {
    gradients[0] = ragged_sort(grad, slots, row_of_slot, top_k, weights);
    // Rows past the rows of the plan contribute to no result, so that their gradient is zero.
    const c10::SymInt spare_rows = rows.sym_size(0) - slots.sym_size(0);
    if (spare_rows != 0) gradients[0] = at::constant_pad_nd_symint(gradients[0], {0, 0, 0, spare_rows});
  }
  if (wanted[4]) gradients[4] = like_weights(ragged_dot(grad, rows, row_of_slot, top_k), *weights);
  return gradients;
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<ragged_unsort, ragged_unsort_backend, Recorded<ragged_unsort, ragged_unsort_backward>>(
      library,
      "ragged_unsort(Tensor rows, Tensor slots, Tensor row_of_slot, int top_k, Tensor? weights=None) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
