#include "ops/mm.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>

#include "kernels/mm.h"
#include "ops/backend.h"
#include "ops/memory.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kOp = "mm";

using OptionalType = std::optional<at::ScalarType>;

void check(const Tensor& a, const Tensor& b, const OptionalTensor& bias, OptionalType out_dtype) {
  Argument(kOp, "a", a).has_dims(2, "[M, K]").is_floating();
  Argument(kOp, "b", b).has_dims(2, "[K, N]").is_floating().has_size(0, a.size(1), "K of a");
  if (bias.has_value()) {
    Argument(kOp, "bias", *bias).has_dims(1, "[N]").is_floating().has_size(0, b.size(1), "N of b");
  }
  if (out_dtype.has_value()) check_floating(kOp, "out_dtype", *out_dtype);
}

// The type of the sums.
at::ScalarType sum_type(const Tensor& a, const Tensor& b) {
  return at::promote_types(at::promote_types(a.scalar_type(), b.scalar_type()), at::kFloat);
}

Tensor mm_aten(const Tensor& a, const Tensor& b, const OptionalTensor& bias, at::ScalarType type) {
  return bias.has_value() ? at::addmm(bias->to(type), a.to(type), b.to(type)) : at::mm(a.to(type), b.to(type));
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
  return {data, dtype_of(m), m.size(0), m.size(1), m.stride(0), m.size(1) == 1 ? 1 : m.stride(1)};
}

Tensor mm_backend(const Tensor& a, const Tensor& b, const OptionalTensor& bias, OptionalType out_dtype) {
  check(a, b, bias, out_dtype);
  const at::ScalarType type = sum_type(a, b);
  if (!uses_kernels(a)) return mm_aten(a, b, bias, type).to(out_dtype.value_or(type));
  const Tensor out = empty({a.size(0), b.size(1)}, a.options().dtype(out_dtype.value_or(type)));
  if (out.numel() == 0) return out;
  const Tensor left = gemm_operand(a);
  const Tensor right = gemm_operand(b);
  const auto offsets = bias.has_value() ? OptionalTensor(bias->to(type).contiguous()) : std::nullopt;
  const auto run = [&]<class T>() {
    maxmoe::mm(Mm<T>{any_matrix(left.const_data_ptr(), left), any_matrix(right.const_data_ptr(), right),
                     const_pointer<T>(offsets), &best_gemm<T>(), any_matrix(out.mutable_data_ptr(), out)},
               torch_executor());
  };
  type == at::kDouble ? run.operator()<double>() : run.operator()<float>();
  return out;
}

class Gradient : public torch::autograd::Function<Gradient> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& a, const Tensor& b, const OptionalTensor& bias,
                        OptionalType out_dtype) {
    ctx->save_for_backward({b.requires_grad() ? a : Tensor(), a.requires_grad() ? b : Tensor()});
    ctx->saved_data["a_dtype"] = a.scalar_type();
    ctx->saved_data["b_dtype"] = b.scalar_type();
    if (requires_grad(bias)) ctx->saved_data["bias_dtype"] = bias->scalar_type();
    return mm(a, b, bias, out_dtype);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto [a, b] = saved_tensors<2>(ctx);
    const Tensor& grad = grads[0];
    const auto dtype = [&](const char* name) { return ctx->saved_data[name].toScalarType(); };
    Tensor grad_a;
    Tensor grad_b;
    Tensor grad_bias;
    if (b.defined()) grad_a = mm(grad, b.t(), std::nullopt, dtype("a_dtype"));
    if (a.defined()) grad_b = mm(a.t(), grad, std::nullopt, dtype("b_dtype"));
    if (ctx->saved_data.count("bias_dtype") > 0) {
      const Tensor ones = at::ones_symint({1, grad.sym_size(0)}, grad.options());
      grad_bias = mm(ones, grad, std::nullopt, dtype("bias_dtype")).squeeze(0);
    }
    return {grad_a, grad_b, grad_bias, Tensor()};
  }

  // A bias is the product of a column of ones: without it the operator is linear in each tensor.
  static Tensor with_tangents(const Tensor& a, const Tensor& b, const OptionalTensor& bias, OptionalType out_dtype) {
    if (!bias.has_value()) return product_rule(mm, a, b, bias, out_dtype);
    const Tensor ones = at::ones({a.size(0), 1}, bias->options());
    return mm(a, b, std::nullopt, out_dtype).add(mm(ones, bias->unsqueeze(0), std::nullopt, out_dtype));
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  mm.define<mm_backend, Gradient>(library,
                                  "mm(Tensor a, Tensor b, *, Tensor? bias=None, ScalarType? out_dtype=None) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
