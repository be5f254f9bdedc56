#include "kernels/rows/ragged_gather_reduce.h"
#include "ops/backend.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/row_sums.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kRaggedGatherReduce = "ragged_gather_reduce";

void check_ragged_gather_reduce(const Tensor& rows, const Tensor& index, int64_t group_size,
                                const OptionalTensor& weights, const OptionalTensor& valid) {
  Argument(kRaggedGatherReduce, "rows", rows).has_dims(2, "[R, D]").is_floating();
  Argument(kRaggedGatherReduce, "index", index).has_dims(1, "[M]").is_int64();
  MAXMOE_CHECK(group_size >= 1, kRaggedGatherReduce, "group_size must be at least 1, got ", group_size);
  MAXMOE_CHECK(index.size(0) % group_size == 0, kRaggedGatherReduce, "group_size must divide the size of index (",
               index.size(0), "), got ", group_size);
  check_weights(kRaggedGatherReduce, weights, index.size(0));
  if (valid.has_value()) {
    Argument(kRaggedGatherReduce, "valid", *valid).has_dims(1, "[M]").is_bool();
    Argument(kRaggedGatherReduce, "valid", *valid).has_size(0, index.size(0), "size of index");
  }
  // The values are checked last, because that reads the whole index.
  Argument(kRaggedGatherReduce, "index", index).has_values_in(-1, rows.size(0), "-1 or a row of rows");
}

// A copy of the index with -1 for slots that are not valid.
Tensor masked_index(const Tensor& index, const OptionalTensor& valid) {
  return valid.has_value() ? index.masked_fill(valid->logical_not(), -1) : index;
}

Tensor ragged_gather_reduce_backend(const Tensor& rows, const Tensor& index, int64_t group_size,
                                    const OptionalTensor& weights, const OptionalTensor& valid) {
  check_ragged_gather_reduce(rows, index, group_size, weights, valid);
  if (!uses_kernels(rows)) {
    return RowSums::of_groups(masked_index(index, valid), group_size, weights, rows.scalar_type())(rows);
  }
  const Tensor out = empty({index.size(0) / group_size, rows.size(1)}, rows.options());
  const Tensor source = contiguous_rows(rows);
  const Tensor list = index.contiguous();
  const auto scale = accumulator_weights(weights, rows.scalar_type());
  const auto mask = valid.has_value() ? OptionalTensor(valid->contiguous()) : std::nullopt;
  for_dtype(rows.scalar_type(), [&]<class T>() {
    maxmoe::ragged_gather_reduce(
        RaggedGatherReduce<T>{const_view<T>(source), const_pointer<int64_t>(list), group_size,
                              const_pointer<Accumulator<T>>(scale), const_pointer<bool>(mask), view<T>(out)},
        torch_executor());
  });
  return out;
}

class RaggedGatherReduceGradient : public torch::autograd::Function<RaggedGatherReduceGradient> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& rows, const Tensor& index, int64_t group_size,
                        const OptionalTensor& weights, const OptionalTensor& valid) {
    const Tensor out = ragged_gather_reduce(rows, index, group_size, weights, valid);
    // `rows` is only needed for the gradient of weights, which is <grad, rows>.
    const Tensor saved_rows = requires_grad(weights) ? rows : Tensor();
    ctx->save_for_backward({saved_rows, masked_index(index, valid), defined_or_empty(weights)});
    ctx->saved_data["num_rows"] = rows.sym_size(0);
    ctx->saved_data["group_size"] = group_size;
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    const auto [rows, index, weights] = saved_tensors<3>(ctx);
    const int64_t group_size = ctx->saved_data["group_size"].toInt();
    Tensor grad_rows;
    Tensor grad_weights;
    if (ctx->needs_input_grad(0)) {
      const c10::SymInt num_rows = ctx->saved_data["num_rows"].toSymInt();
      grad_rows = ragged_scatter_add(grads[0], index, num_rows, group_size, optional_tensor(weights));
    }
    if (weights.defined() && ctx->needs_input_grad(2)) {
      grad_weights = like_weights(ragged_dot(grads[0], rows, index, group_size), weights);
    }
    return {grad_rows, Tensor(), Tensor(), grad_weights, Tensor()};
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  ragged_gather_reduce.define<ragged_gather_reduce_backend, RaggedGatherReduceGradient>(
      library,
      "ragged_gather_reduce(Tensor rows, Tensor index, int group_size, Tensor? weights=None, *, Tensor? valid=None) "
      "-> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
