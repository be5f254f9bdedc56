#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "kernels/rows/ragged_dot.h"
#include "ops/backend.h"
#include "ops/operators.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kRaggedDot = "ragged_dot";

void check_ragged_dot(const Tensor& a, const Tensor& b, const Tensor& index, int64_t group_size) {
  Argument(kRaggedDot, "a", a).has_dims(2, "[M / group_size, D]").is_floating();
  Argument(kRaggedDot, "b", b).has_dims(2, "[N, D]").has_dtype_of("a", a);
  Argument(kRaggedDot, "b", b).has_size(1, a.size(1), "D of a");
  Argument(kRaggedDot, "index", index).has_dims(1, "[M]").is_int64();
  MAXMOE_CHECK(group_size >= 1, kRaggedDot, "group_size must be at least 1, got ", group_size);
  Argument(kRaggedDot, "index", index)
      .has_size(0, checked_product(kRaggedDot, "group_size", a.size(0), group_size), "rows of a times group_size");
  // The values are checked last, because that reads the whole index.
  Argument(kRaggedDot, "index", index).has_values_in(-1, b.size(0), "-1 or a row of b");
}

// Some groups after the other, so that no tensor of [M, D] is allocated.
Tensor ragged_dot_aten(const Tensor& a, const Tensor& b, const Tensor& index, int64_t group_size) {
  constexpr int64_t kMostProducts = int64_t{1} << 23;  // 32 MiB in float32
  const auto type = accumulator_type(a.scalar_type());
  if (b.size(0) == 0 || a.size(0) == 0) return at::zeros({index.size(0)}, a.options().dtype(type));
  const int64_t width = a.size(1);
  const int64_t groups_at_once = std::max<int64_t>(1, kMostProducts / std::max<int64_t>(1, group_size * width));
  const Tensor row = index.clamp_min(0);
  const Tensor out = at::empty({a.size(0), group_size}, a.options().dtype(type));
  for (int64_t first = 0; first < a.size(0); first += groups_at_once) {
    const int64_t count = std::min(groups_at_once, a.size(0) - first);
    const Tensor left = a.narrow(0, first, count).to(type).unsqueeze(1);
    const Tensor right = b.index_select(0, row.narrow(0, first * group_size, count * group_size));
    out.narrow(0, first, count).copy_((left * right.view({count, group_size, width})).sum(2));
  }
  return out.view(-1).masked_fill_(index.lt(0), 0);
}

Tensor ragged_dot_backend(const Tensor& a, const Tensor& b, const Tensor& index, int64_t group_size) {
  check_ragged_dot(a, b, index, group_size);
  if (!uses_kernels(a)) return ragged_dot_aten(a, b, index, group_size);
  const Tensor out = at::empty({index.size(0)}, a.options().dtype(accumulator_type(a.scalar_type())));
  const Tensor left = contiguous_rows(a);
  const Tensor right = contiguous_rows(b);
  const Tensor list = index.contiguous();
  for_dtype(a.scalar_type(), [&]<class T>() {
    maxmoe::ragged_dot(RaggedDot<T>{const_view<T>(left), const_view<T>(right), const_pointer<int64_t>(list),
                                    list.numel(), group_size, pointer<Accumulator<T>>(out)},
                       torch_executor());
  });
  return out;
}

class RaggedDotGradient : public torch::autograd::Function<RaggedDotGradient> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, const Tensor& index,
                        int64_t group_size) {
    ctx->save_for_backward({a, b, index});
    ctx->saved_data["group_size"] = group_size;
    return ragged_dot(a, b, index, group_size);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    const auto [a, b, index] = saved_tensors<3>(ctx);
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    Tensor grad_a;
    Tensor grad_b;
    if (ctx->needs_input_grad(0)) grad_a = ragged_gather_reduce(b, index, group_size, grads[0], std::nullopt);
    if (ctx->needs_input_grad(1)) grad_b = ragged_scatter_add(a, index, b.sym_size(0), group_size, grads[0]);
    return {grad_a, grad_b, Tensor(), Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  ragged_dot.define<ragged_dot_backend, RaggedDotGradient>(
      library, "ragged_dot(Tensor a, Tensor b, Tensor index, int group_size=1) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
