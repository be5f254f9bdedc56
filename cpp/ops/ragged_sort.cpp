#include "kernels/rows/ragged_sort.h"
#include "ops/backend.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/row_sums.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kRaggedSort = "ragged_sort";

void check_ragged_sort(const Tensor& x, const Tensor& slots, const Tensor& rows, int64_t top_k,
                       const OptionalTensor& weights) {
  Argument(kRaggedSort, "x", x).has_dims(2, "[T, D]").is_floating();
  check_weights(kRaggedSort, weights, rows.numel());
  check_routed_rows(kRaggedSort, slots, rows, x.size(0), slots.numel(), top_k);
}

// Rows of no slot (-1) are zero.
Tensor ragged_sort_aten(const Tensor& x, const Tensor& slots, int64_t top_k, const OptionalTensor& weights) {
  const Tensor is_absent = slots.lt(0).unsqueeze(1);
  const Tensor slot = slots.clamp_min(0);
  const Tensor token = slot.div(top_k, "floor");
  if (!weights.has_value()) return x.index_select(0, token).masked_fill_(is_absent, 0);
  const Tensor scale = weights->reshape(-1).index_select(0, slot);
  return weighted_rows(x, token, scale).masked_fill_(is_absent, 0);
}

Tensor ragged_sort_backend(const Tensor& x, const Tensor& slots, const Tensor& rows, int64_t top_k,
                           const OptionalTensor& weights) {
  check_ragged_sort(x, slots, rows, top_k, weights);
  if (!uses_kernels(x)) return ragged_sort_aten(x, slots, top_k, weights);
  const Tensor out = empty({slots.size(0), x.size(1)}, x.options());
  const Tensor source = contiguous_rows(x);
  const Tensor list = slots.contiguous();
  const auto scale = accumulator_weights(weights, x.scalar_type());
  for_dtype(x.scalar_type(), [&]<class T>() {
    maxmoe::ragged_sort(RaggedSort<T>{const_view<T>(source), const_pointer<int64_t>(list), top_k,
                                      const_pointer<Accumulator<T>>(scale), view<T>(out)},
                        torch_executor());
  });
  return out;
}

class RaggedSortGradient : public torch::autograd::Function<RaggedSortGradient> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& slots, const Tensor& rows, int64_t top_k,
                        const OptionalTensor& weights) {
    // x is only needed for the gradient of weights, which is <grad, x>.
    ctx->save_for_backward({requires_grad(weights) ? x : Tensor(), slots, rows, defined_or_empty(weights)});
    ctx->saved_data["top_k"] = top_k;
    return ragged_sort(x, slots, rows, top_k, weights);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    const auto [x, slots, rows, weights] = saved_tensors<4>(ctx);
    const int64_t top_k = ctx->saved_data["top_k"].toInt();
    Tensor grad_x;
    Tensor grad_weights;
    if (ctx->needs_input_grad(0)) grad_x = ragged_unsort(grads[0], slots, rows, top_k, optional_tensor(weights));
    if (weights.defined() && ctx->needs_input_grad(3)) {
      grad_weights = like_weights(ragged_dot(x, grads[0], rows, top_k), weights);
    }
    return {grad_x, Tensor(), Tensor(), Tensor(), grad_weights};
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  ragged_sort.define<ragged_sort_backend, RaggedSortGradient>(
      library, "ragged_sort(Tensor x, Tensor slots, Tensor rows, int top_k, Tensor? weights=None) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
