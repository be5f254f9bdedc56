#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include "kernels/rows/ragged_scatter_add.h"
#include "ops/backend.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kRaggedScatterAdd = "ragged_scatter_add";

void check_ragged_scatter_add(const Tensor& rows, const Tensor& index, int64_t num_rows, int64_t group_size,
                              const OptionalTensor& weights) {
  Argument(kRaggedScatterAdd, "rows", rows).has_dims(2, "[M / group_size, D]").is_floating();
  Argument(kRaggedScatterAdd, "index", index).has_dims(1, "[M]").is_int64();
  MAXMOE_CHECK(0 <= num_rows && num_rows < kLongestList, kRaggedScatterAdd,
               "num_rows must not be negative and less than ", kLongestList, ", got ", num_rows);
  MAXMOE_CHECK(group_size >= 1, kRaggedScatterAdd, "group_size must be at least 1, got ", group_size);
  Argument(kRaggedScatterAdd, "index", index)
      .has_size(0, checked_product(kRaggedScatterAdd, "group_size", rows.size(0), group_size), "rows times group_size");
  check_weights(kRaggedScatterAdd, weights, index.size(0));
  // The values are checked last, because that reads the whole index.
  Argument(kRaggedScatterAdd, "index", index).has_values_in(-1, num_rows, "-1 or a row of the result");
}

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
  check_ragged_scatter_add(rows, index, num_rows, group_size, weights);
  if (!uses_kernels(rows)) return ragged_scatter_add_aten(rows, index, num_rows, group_size, weights);
  const Tensor out = empty({num_rows, rows.size(1)}, rows.options());
  if (out.numel() == 0) return out;
  const Tensor source = contiguous_rows(rows);
  const Tensor list = index.contiguous();
  // Work space: the kernel inverts the index first, so that each row of the result is summed by one thread in the order
  // of the index. Atomic additions would give other bits in each run.
  const Tensor offsets = at::empty({num_rows + 1}, list.options());
  const Tensor order = at::empty_like(list);
  const auto scale = accumulator_weights(weights, rows.scalar_type());
  for_dtype(rows.scalar_type(), [&]<class T>() {
    maxmoe::ragged_scatter_add(RaggedScatterAdd<T>{const_view<T>(source), const_pointer<int64_t>(list), list.numel(),
                                                   group_size, const_pointer<Accumulator<T>>(scale),
                                                   pointer<int64_t>(offsets), pointer<int64_t>(order), view<T>(out)},
                               torch_executor());
  });
  return out;
}

class RaggedScatterAddGradient : public torch::autograd::Function<RaggedScatterAddGradient> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& index, c10::SymInt num_rows,
                        int64_t group_size, const OptionalTensor& weights) {
    // `rows` is only needed for the gradient of weights, which is <grad, rows>.
    ctx->save_for_backward({requires_grad(weights) ? rows : Tensor(), index, defined_or_empty(weights)});
    ctx->saved_data["group_size"] = group_size;
    return ragged_scatter_add(rows, index, std::move(num_rows), group_size, weights);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    const auto [rows, index, weights] = saved_tensors<3>(ctx);
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    Tensor grad_rows;
    Tensor grad_weights;
    if (ctx->needs_input_grad(0)) {
      grad_rows = ragged_gather_reduce(grads[0], index, group_size, optional_tensor(weights), std::nullopt);
    }
    if (weights.defined() && ctx->needs_input_grad(2)) {
      grad_weights = like_weights(ragged_dot(rows, grads[0], index, group_size), weights);
    }
    return {grad_rows, Tensor(), Tensor(), Tensor(), grad_weights};
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  ragged_scatter_add.define<ragged_scatter_add_backend, RaggedScatterAddGradient>(
      library,
      "ragged_scatter_add(Tensor rows, Tensor index, SymInt num_rows, int group_size=1, Tensor? weights=None) "
      "-> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
