#include "ops/backend.h"
#include "ops/operators.h"
#include "ops/registration.h"
#include "ops/row_sums.h"

namespace maxmoe::ops {
namespace {

// The index with -1 for slots that are not valid.
Tensor masked_index(const Tensor& index, const OptionalTensor& valid) {
  return valid.has_value() ? index.masked_fill(valid->logical_not(), -1) : index;
}

Tensor ragged_gather_reduce_backend(const Tensor& rows, const Tensor& index, int64_t group_size,
                                    const OptionalTensor& weights, const OptionalTensor& valid) {
  constexpr const char* kOp = "ragged_gather_reduce";
  Argument(kOp, "rows", rows).has_dims(2, "[R, D]").is_floating();
  Argument(kOp, "index", index).has_dims(1, "[M]").is_int64();
  check_group_size(kOp, group_size);
  MAXMOE_CHECK(index.size(0) % group_size == 0, kOp, "group_size must divide the size of index (", index.size(0),
               "), got ", group_size);
  check_weights(kOp, weights, index.size(0));
  if (valid.has_value()) {
    Argument(kOp, "valid", *valid).has_dims(1, "[M]").is_bool().has_size(0, index.size(0), "size of index");
  }
  Argument(kOp, "index", index).has_values_in(-1, rows.size(0), "-1 or a row of rows", kOp);
  if (path_of(rows, kOp) == Path::aten) {
    return sums_of_groups(masked_index(index, valid), group_size, weights, rows.scalar_type(), {[&] { return rows; }});
  }
  return sum_rows(rows, index, group_size, weights, valid);
}

variable_list ragged_gather_reduce_backward(WantedGradients wanted, const Tensor& grad, const Tensor& rows,
                                            const Tensor& index, int64_t group_size, const OptionalTensor& weights,
                                            const OptionalTensor& valid) {
  const Tensor masked = masked_index(index, valid);
  return {wanted[0] ? ragged_scatter_add(grad, masked, rows.sym_size(0), group_size, weights) : Tensor(), Tensor(),
          Tensor(), wanted[3] ? like_weights(ragged_dot(grad, rows, masked, group_size), *weights) : Tensor()};
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<ragged_gather_reduce, ragged_gather_reduce_backend,
         Recorded<ragged_gather_reduce, ragged_gather_reduce_backward>>(
      library,
      "ragged_gather_reduce(Tensor rows, Tensor index, int group_size, Tensor? weights=None, *, Tensor? valid=None) "
      "-> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
