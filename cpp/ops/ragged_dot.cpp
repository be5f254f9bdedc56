#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <algorithm>

#include "kernels/rows/ragged_dot.h"
#include "ops/backend.h"
#include "ops/cuda_kernels.h"
#include "ops/operators.h"
#include "ops/registration.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// A few groups at a time, so that no tensor of [M, D] is allocated.
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
  constexpr const char* kOp = "ragged_dot";
  Argument(kOp, "a", a).has_dims(2, "[M / group_size, D]").is_floating();
  Argument(kOp, "b", b).has_dims(2, "[N, D]").has_dtype_of("a", a).has_size(1, a.size(1), "D of a");
  check_group_size(kOp, group_size);
  Argument(kOp, "index", index)
      .has_dims(1, "[M]")
      .is_int64()
      .has_size(0, checked_product(kOp, "group_size", a.size(0), group_size), "rows of a times group_size")
      .has_values_in(-1, b.size(0), "-1 or a row of b", kOp);
  if (path_of(a, kOp) == Path::aten) return ragged_dot_aten(a, b, index, group_size);
  const Tensor out = at::empty({index.size(0)}, a.options().dtype(accumulator_type(a.scalar_type())));
  for_dtype(a.scalar_type(), [&]<class T>() {
    run(cuda_kernels(a, kOp), &cuda::RowKernels<T>::ragged_dot, maxmoe::ragged_dot<T>,
        {Rows(a), Rows(b), List(index), index.numel(), group_size, pointer<Accumulator<T>>(out)});
  });
  return out;
}

variable_list ragged_dot_backward(WantedGradients wanted, const Tensor& grad, const Tensor& a, const Tensor& b,
                                  const Tensor& index, int64_t group_size) {
  return {wanted[0] ? ragged_gather_reduce(b, index, group_size, grad, std::nullopt) : Tensor(),
          wanted[1] ? ragged_scatter_add(a, index, b.sym_size(0), group_size, grad) : Tensor()};
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<ragged_dot, ragged_dot_backend, Recorded<ragged_dot, ragged_dot_backward>>(
      library, "ragged_dot(Tensor a, Tensor b, Tensor index, int group_size=1) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
