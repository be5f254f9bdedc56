#include "ops/ragged_scatter_add.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>

#include "kernels/ragged_scatter_add.h"
#include "ops/autograd.h"
#include "ops/backend.h"
#include "ops/checks.h"
#include "ops/memory.h"
#include "ops/ragged_dot.h"
#include "ops/ragged_gather_reduce.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kOp = "ragged_scatter_add";

TORCH_LIBRARY_FRAGMENT(maxmoe, m) {
  m.def(
      "ragged_scatter_add(Tensor rows, Tensor index, SymInt num_rows, int group_size=1, Tensor? weights=None) "
      "-> Tensor");
}

void check(const Tensor& rows, const Tensor& index, int64_t num_rows, int64_t group_size,
           const OptionalTensor& weights) {
  Argument(kOp, "rows", rows).has_dims(2, "[M / group_size, D]").is_floating();
  Argument(kOp, "index", index).has_dims(1, "[M]").is_int64().is_on_device_of("rows", rows);
  MAXMOE_CHECK(num_rows >= 0, kOp, "num_rows must not be negative, got ", num_rows);
  MAXMOE_CHECK(group_size >= 1, kOp, "group_size must be at least 1, got ", group_size);
  Argument(kOp, "index", index).has_size(0, rows.size(0) * group_size, "rows times group_size");
  check_weights(kOp, weights, rows, index.size(0));
  Argument(kOp, "index", index).has_values_in(-1, num_rows, "-1 or a row of the result");
}

// Row num_rows takes what is routed nowhere.
Tensor ragged_scatter_add_aten(const Tensor& rows, const Tensor& index, int64_t num_rows, int64_t group_size,
                               const OptionalTensor& weights) {
  const auto type = accumulator_type(rows.scalar_type());
  Tensor added = rows.repeat_interleave(group_size, 0).to(type);
  if (weights.has_value()) added = added * weights->reshape({-1, 1}).to(type);
  const Tensor target = at::where(index.ge(0), index, num_rows);
  const Tensor out = at::zeros({num_rows + 1, rows.size(1)}, added.options()).index_add(0, target, added);
  return out.narrow(0, 0, num_rows).to(rows.scalar_type());
}

Tensor ragged_scatter_add_backend(const Tensor& rows, const Tensor& index, int64_t num_rows, int64_t group_size,
                                  const OptionalTensor& weights) {
  check(rows, index, num_rows, group_size, weights);
  if (!uses_kernels(rows)) return ragged_scatter_add_aten(rows, index, num_rows, group_size, weights);
  const Tensor out = empty({num_rows, rows.size(1)}, rows.options());
  const Tensor source = contiguous_rows(rows);
  const Tensor list = index.contiguous();
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

class Gradient : public torch::autograd::Function<Gradient> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& index, c10::SymInt num_rows,
                        int64_t group_size, const OptionalTensor& weights) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({requires_grad(weights) ? rows : Tensor(), index, defined_or_empty(weights)});
    ctx->saved_data["group_size"] = group_size;
    return ops::ragged_scatter_add(rows, index, std::move(num_rows), group_size, weights);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor& index = saved[1];
    const auto weights = optional_tensor(saved[2]);
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    Tensor grad_rows;
    Tensor grad_weights;
    if (ctx->needs_input_grad(0)) grad_rows = ragged_gather_reduce(grads[0], index, group_size, weights, std::nullopt);
    if (saved[0].defined()) {
      grad_weights = ragged_dot(saved[0], grads[0], index, group_size).view_as(*weights).to(weights->scalar_type());
    }
    return {grad_rows, Tensor(), Tensor(), Tensor(), grad_weights};
  }
};

Tensor ragged_scatter_add_autograd(const Tensor& rows, const Tensor& index, c10::SymInt num_rows, int64_t group_size,
                                   const OptionalTensor& weights) {
  if (needs_gradient(rows, defined_or_empty(weights))) {
    return Gradient::apply(rows, index, std::move(num_rows), group_size, weights);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return ops::ragged_scatter_add(rows, index, std::move(num_rows), group_size, weights);
}

TORCH_LIBRARY_IMPL(maxmoe, CompositeExplicitAutograd, m) {
  m.impl("ragged_scatter_add", &ragged_scatter_add_backend);
}
TORCH_LIBRARY_IMPL(maxmoe, Autograd, m) {
  m.impl("ragged_scatter_add", &ragged_scatter_add_autograd);
}

}  // namespace

Tensor ragged_scatter_add(const Tensor& rows, const Tensor& index, c10::SymInt num_rows, int64_t group_size,
                          const OptionalTensor& weights) {
  static const auto op = find_operator<decltype(ragged_scatter_add)>("maxmoe::ragged_scatter_add");
  return op.call(rows, index, std::move(num_rows), group_size, weights);
}

}  // namespace maxmoe::ops
