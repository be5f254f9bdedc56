#include <ATen/ops/arange.h>

#include "ops/backend.h"
#include "ops/operators.h"
#include "ops/registration.h"
#include "ops/row_sums.h"

namespace maxmoe::ops {
namespace {

// The index with -1 outside of [start, end).
Tensor masked_index(const Tensor& index, const c10::SymInt& start, const std::optional<c10::SymInt>& end) {
  if (start == 0 && !end.has_value()) return index;
  const Tensor position = at::arange(index.sym_size(0), index.options());
  return index.masked_fill(position.lt(start).logical_or(position.ge(end.value_or(index.sym_size(0)))), -1);
}

Tensor ragged_gather_backend(const Tensor& x, const Tensor& index, const OptionalTensor& weights, int64_t start,
                             std::optional<int64_t> end_or_all) {
  constexpr const char* kOp = "ragged_gather";
  Argument(kOp, "x", x).has_dims(2, "[N, D]").is_floating();
  Argument(kOp, "index", index).has_dims(1, "[M]").is_int64();
  const int64_t size = index.size(0);
  const int64_t end = end_or_all.value_or(size);
  check_weights(kOp, weights, size);
  MAXMOE_CHECK(0 <= start && start <= size, kOp, "start must be in [0, ", size, "], got ", start);
  MAXMOE_CHECK(start <= end && end <= size, kOp, "end must be in [start (", start, "), ", size, "], got ", end);
  Argument(kOp, "index", index).has_values_in(-1, x.size(0), "-1 or a row of x", kOp);
  if (path_of(x, kOp) == Path::aten) return selected_rows_or_zeros(x, masked_index(index, start, end), weights);
  return gather_rows(x, index, weights, start, end);
}

variable_list ragged_gather_backward(WantedGradients wanted, const Tensor& grad, const Tensor& x, const Tensor& index,
                                     const OptionalTensor& weights, const c10::SymInt& start,
                                     const std::optional<c10::SymInt>& end) {
  const Tensor rows = masked_index(index, start, end);
  return {wanted[0] ? ragged_scatter_add(grad, rows, x.sym_size(0), 1, weights) : Tensor(), Tensor(),
          wanted[2] ? like_weights(ragged_dot(grad, x, rows, 1), *weights) : Tensor()};
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<ragged_gather, ragged_gather_backend, Recorded<ragged_gather, ragged_gather_backward>>(
      library,
      "ragged_gather(Tensor x, Tensor index, Tensor? weights=None, *, SymInt start=0, SymInt? end=None) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
