#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include "kernels/product/linear.h"
#include "ops/backend.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/registration.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

using OptionalType = std::optional<at::ScalarType>;

// The dtype of the sums: at least float32, which the router needs for 16-bit inputs.
at::ScalarType sum_type(const Tensor& x, const Tensor& weight) {
  return at::promote_types(at::promote_types(x.scalar_type(), weight.scalar_type()), at::kFloat);
}

Tensor linear_aten(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, at::ScalarType type) {
  // CUDA alone sums products of 16-bit numbers in float32 without copies of the operands.
  if (x.is_cuda() && x.scalar_type() == weight.scalar_type() && x.scalar_type() != type) {
    const Tensor product = at::mm(x, weight.t(), type);
    return bias.has_value() ? product.add(bias->to(type)) : product;
  }
  const Tensor matrix = weight.to(type).t();
  return bias.has_value() ? at::addmm(bias->to(type), x.to(type), matrix) : at::mm(x.to(type), matrix);
}

Dtype dtype_of(const Tensor& tensor) {
  switch (tensor.scalar_type()) {
    case at::kDouble:
      return Dtype::float64;
    case at::kFloat:
      return Dtype::float32;
    case at::kBFloat16:
      return Dtype::bfloat16;
    default:
      return Dtype::float16;
  }
}

template <class Data>
AnyMatrix<Data> any_matrix(Data* data, const Tensor& m) {
  return {data, dtype_of(m), m.size(0), m.size(1), m.stride(0), m.size(1) <= 1 ? 1 : m.stride(1)};
}

Tensor linear_backend(const Tensor& x, const Tensor& weight, const OptionalTensor& bias, OptionalType out_dtype) {
  constexpr const char* kOp = "linear";
  Argument(kOp, "x", x).has_dims(2, "[T, D]").is_floating();
  Argument(kOp, "weight", weight).has_dims(2, "[E, D]").is_floating().has_size(1, x.size(1), "D of x");
  if (bias.has_value()) {
    Argument(kOp, "bias", *bias).has_dims(1, "[E]").is_floating().has_size(0, weight.size(0), "E of weight");
  }
  if (out_dtype.has_value()) check_floating(kOp, "out_dtype", *out_dtype);
  const at::ScalarType type = sum_type(x, weight);
  if (!uses_kernels(x)) return linear_aten(x, weight, bias, type).to(out_dtype.value_or(type));
  const Tensor out = empty({x.size(0), weight.size(0)}, x.options().dtype(out_dtype.value_or(type)));
  if (out.numel() == 0) return out;
  const Tensor left = gemm_operand(x);
  const Tensor right = gemm_operand(weight);
  const List offsets(bias.has_value() ? OptionalTensor(bias->to(type)) : std::nullopt);
  // The kernel converts 16-bit operands in blocks, so that no float32 copy of x or weight is allocated.
  for_accumulator_type(type, [&]<class T>() {
    maxmoe::linear(Linear<T>{any_matrix(left.const_data_ptr(), left), any_matrix(right.const_data_ptr(), right),
                             offsets, &kernel_gemm<T>(), any_matrix(out.mutable_data_ptr(), out)},
                   torch_executor());
  });
  return out;
}

variable_list linear_backward(WantedGradients wanted, const Tensor& grad, const Tensor& x, const Tensor& weight,
                              const OptionalTensor& bias, OptionalType /*out_dtype*/) {
  variable_list gradients(3);
  if (wanted[0]) gradients[0] = linear(grad, weight.t(), std::nullopt, x.scalar_type());
  if (wanted[1]) gradients[1] = linear(grad.t(), x.t(), std::nullopt, weight.scalar_type());
  if (wanted[2]) {
    // The sum of the rows, as a product with a row of ones: in float32, and in the order of a product.
    const Tensor ones = at::ones_symint({1, grad.sym_size(0)}, grad.options());
    gradients[2] = linear(ones, grad.t(), std::nullopt, bias->scalar_type()).squeeze(0);
  }
  return gradients;
}

struct LinearGradient : Recorded<linear, linear_backward, /*num_factors=*/2> {
  // With a bias the operator is not linear in x and weight. So the bias is written as a product with a column of ones.
  static Tensor with_tangents(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                              OptionalType out_dtype) {
    if (!bias.has_value()) return product_rule(linear, x, weight, bias, out_dtype);
    const at::ScalarType type = out_dtype.value_or(sum_type(x, weight));
    const Tensor ones = at::ones({x.size(0), 1}, bias->options());
    return linear(x, weight, std::nullopt, type).add(linear(ones, bias->unsqueeze(1), std::nullopt, type));
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<linear, linear_backend, LinearGradient>(
      library, "linear(Tensor x, Tensor weight, Tensor? bias=None, *, ScalarType? out_dtype=None) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
