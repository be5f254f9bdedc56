#include <ATen/ops/arange.h>
#include <ATen/ops/zeros.h>

#include "kernels/rows/ragged_gather.h"
#include "ops/backend.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/row_sums.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kRaggedGather = "ragged_gather";

void check_ragged_gather(const Tensor& x, const Tensor& index, const OptionalTensor& weights, int64_t start,
                         int64_t end) {
  Argument(kRaggedGather, "x", x).has_dims(2, "[N, D]").is_floating();
  Argument(kRaggedGather, "index", index).has_dims(1, "[M]").is_int64();
  check_weights(kRaggedGather, weights, index.size(0));
  MAXMOE_CHECK(0 <= start && start <= index.size(0), kRaggedGather, "start must be in [0, ", index.size(0), "], got ",
               start);
  MAXMOE_CHECK(start <= end && end <= index.size(0), kRaggedGather, "end must be in [start (", start, "), ",
               index.size(0), "], got ", end);
  // The values are checked last, because that reads the whole index.
  Argument(kRaggedGather, "index", index).has_values_in(-1, x.size(0), "-1 or a row of x");
}

// A copy of the index with -1 outside of [start, end).
Tensor masked_index(const Tensor& index, const c10::SymInt& start, const c10::SymInt& end) {
  const Tensor position = at::arange(index.sym_size(0), index.options());
  return index.masked_fill(position.lt(start).logical_or(position.ge(end)), -1);
}

Tensor ragged_gather_aten(const Tensor& x, const Tensor& index, const OptionalTensor& weights, int64_t start,
                          int64_t end) {
  if (x.size(0) == 0) return at::zeros({index.size(0), x.size(1)}, x.options());
  const Tensor masked = masked_index(index, start, end);
  const Tensor row = masked.clamp_min(0);
  const Tensor out = weights.has_value() ? weighted_rows(x, row, weights->reshape(-1)) : x.index_select(0, row);
  return out.masked_fill_(masked.lt(0).unsqueeze(1), 0);
}

Tensor ragged_gather_backend(const Tensor& x, const Tensor& index, const OptionalTensor& weights, int64_t start,
                             std::optional<int64_t> end_or_all) {
  const int64_t end = end_or_all.value_or(index.dim() == 1 ? index.size(0) : start);
  check_ragged_gather(x, index, weights, start, end);
  if (!uses_kernels(x)) return ragged_gather_aten(x, index, weights, start, end);
  const Tensor out = empty({index.size(0), x.size(1)}, x.options());
  const Tensor source = contiguous_rows(x);
  const Tensor list = index.contiguous();
  const auto scale = accumulator_weights(weights, x.scalar_type());
  for_dtype(x.scalar_type(), [&]<class T>() {
    maxmoe::ragged_gather(RaggedGather<T>{const_view<T>(source), const_pointer<int64_t>(list),
                                          const_pointer<Accumulator<T>>(scale), start, end, view<T>(out)},
                          torch_executor());
  });
  return out;
}

class RaggedGatherGradient : public torch::autograd::Function<RaggedGatherGradient> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& x, const Tensor& index, const OptionalTensor& weights,
                        const c10::SymInt& start, const std::optional<c10::SymInt>& end) {
    const Tensor out = ragged_gather(x, index, weights, start, end);
    const bool is_whole = start == 0 && !end.has_value();
    const Tensor masked = is_whole ? index : masked_index(index, start, end.value_or(index.sym_size(0)));
    // x is only needed for the gradient of weights, which is <grad, x>.
    ctx->save_for_backward({requires_grad(weights) ? x : Tensor(), masked, defined_or_empty(weights)});
    ctx->saved_data["num_rows"] = x.sym_size(0);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    const auto [x, index, weights] = saved_tensors<3>(ctx);
    Tensor grad_x;
    Tensor grad_weights;
    if (ctx->needs_input_grad(0)) {
      grad_x = ragged_scatter_add(grads[0], index, ctx->saved_data["num_rows"].toSymInt(), 1, optional_tensor(weights));
    }
    if (weights.defined() && ctx->needs_input_grad(2)) {
      grad_weights = like_weights(ragged_dot(grads[0], x, index, 1), weights);
    }
    return {grad_x, Tensor(), grad_weights, Tensor(), Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  ragged_gather.define<ragged_gather_backend, RaggedGatherGradient>(
      library,
      "ragged_gather(Tensor x, Tensor index, Tensor? weights=None, *, SymInt start=0, SymInt? end=None) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
