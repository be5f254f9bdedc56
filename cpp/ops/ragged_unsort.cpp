#include "kernels/rows/ragged_unsort.h"
#include "ops/backend.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kRaggedUnsort = "ragged_unsort";

void check_ragged_unsort(const Tensor& rows, const Tensor& slots, const Tensor& row_of_slot, int64_t top_k,
                         const OptionalTensor& weights) {
  Argument(kRaggedUnsort, "rows", rows).has_dims(2, "[R, D]").is_floating();
  MAXMOE_CHECK(top_k >= 1, kRaggedUnsort, "top_k must be at least 1, got ", top_k);
  MAXMOE_CHECK(row_of_slot.numel() % top_k == 0, kRaggedUnsort, "top_k must divide the slots of the plan (",
               row_of_slot.numel(), "), got ", top_k);
  MAXMOE_CHECK(rows.size(0) >= slots.numel(), kRaggedUnsort, "rows must have a row for each of the plan's ",
               slots.numel(), ", got shape ", rows.sizes());
  check_weights(kRaggedUnsort, weights, row_of_slot.numel());
  check_routed_rows(kRaggedUnsort, slots, row_of_slot, row_of_slot.numel() / top_k, slots.numel(), top_k);
}

Tensor ragged_unsort_backend(const Tensor& rows, const Tensor& slots, const Tensor& row_of_slot, int64_t top_k,
                             const OptionalTensor& weights) {
  check_ragged_unsort(rows, slots, row_of_slot, top_k, weights);
  if (!uses_kernels(rows)) return ragged_gather_reduce(rows, row_of_slot, top_k, weights, std::nullopt);
  const Tensor out = empty({row_of_slot.size(0) / top_k, rows.size(1)}, rows.options());
  const Tensor source = contiguous_rows(rows);
  const Tensor list = row_of_slot.contiguous();
  const auto scale = accumulator_weights(weights, rows.scalar_type());
  for_dtype(rows.scalar_type(), [&]<class T>() {
    maxmoe::ragged_unsort(RaggedUnsort<T>{const_view<T>(source), const_pointer<int64_t>(list), top_k,
                                          const_pointer<Accumulator<T>>(scale), view<T>(out)},
                          torch_executor());
  });
  return out;
}

class RaggedUnsortGradient : public torch::autograd::Function<RaggedUnsortGradient> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& slots, const Tensor& row_of_slot,
                        int64_t top_k, const OptionalTensor& weights) {
    const Tensor out = ragged_unsort(rows, slots, row_of_slot, top_k, weights);
    // `rows` is only needed for the gradient of weights, which is <grad, rows>.
    const Tensor saved_rows = requires_grad(weights) ? rows : Tensor();
    ctx->save_for_backward({saved_rows, slots, row_of_slot, defined_or_empty(weights)});
    ctx->saved_data["top_k"] = top_k;
    ctx->saved_data["num_rows"] = rows.sym_size(0);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    const auto [rows, slots, row_of_slot, weights] = saved_tensors<4>(ctx);
    const int64_t top_k = ctx->saved_data["top_k"].toInt();
    Tensor grad_rows;
    Tensor grad_weights;
    if (ctx->needs_input_grad(0)) {
      grad_rows = ragged_sort(grads[0], slots, row_of_slot, top_k, optional_tensor(weights));
      // Rows past those of the plan contribute to no result, so that their gradient is zero.
      const c10::SymInt spare_rows = ctx->saved_data["num_rows"].toSymInt() - grad_rows.sym_size(0);
      if (spare_rows != 0) grad_rows = at::constant_pad_nd_symint(grad_rows, {0, 0, 0, spare_rows});
    }
    if (weights.defined() && ctx->needs_input_grad(3)) {
      grad_weights = like_weights(ragged_dot(grads[0], rows, row_of_slot, top_k), weights);
    }
    return {grad_rows, Tensor(), Tensor(), Tensor(), grad_weights};
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  ragged_unsort.define<ragged_unsort_backend, RaggedUnsortGradient>(
      library,
      "ragged_unsort(Tensor rows, Tensor slots, Tensor row_of_slot, int top_k, Tensor? weights=None) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
