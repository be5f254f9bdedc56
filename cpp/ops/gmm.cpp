#include "ops/gmm.h"

#include <ATen/ops/addmm.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include "kernels/gmm.h"
#include "ops/autograd.h"
#include "ops/backend.h"
#include "ops/checks.h"
#include "ops/memory.h"
#include "ops/tgmm.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kOp = "gmm";

TORCH_LIBRARY_FRAGMENT(maxmoe, m) {
  m.def("gmm(Tensor lhs, Tensor rhs, Tensor group_sizes, *, Tensor? bias=None, int group_offset=0) -> Tensor");
}

void check(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, const OptionalTensor& bias) {
  Argument(kOp, "lhs", lhs).has_dims(2, "[R, D]").is_floating();
  Argument(kOp, "rhs", rhs).has_dims(3, "[L, D, F]").has_dtype_of("lhs", lhs).is_on_device_of("lhs", lhs);
  Argument(kOp, "rhs", rhs).has_size(1, lhs.size(1), "D of lhs");
  if (bias.has_value()) {
    Argument(kOp, "bias", *bias).has_dims(2, "[L, F]").has_dtype_of("lhs", lhs).is_on_device_of("lhs", lhs);
    Argument(kOp, "bias", *bias).has_size(0, rhs.size(0), "L of rhs").has_size(1, rhs.size(2), "F of rhs");
  }
  check_group_sizes(kOp, group_sizes, lhs, lhs.size(0), Sum::at_most);
}

Tensor gmm_aten(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
                int64_t group_offset) {
  const Tensor out = at::zeros({lhs.size(0), rhs.size(2)}, lhs.options());
  const Tensor sizes = group_sizes.cpu().contiguous();
  int64_t row = 0;
  for (int64_t group = 0; group < sizes.numel(); ++group) {
    const int64_t size = sizes.const_data_ptr<int64_t>()[group];
    const int64_t local = group - group_offset;
    if (size > 0 && local >= 0 && local < rhs.size(0)) {
      const Tensor rows = lhs.narrow(0, row, size);
      const Tensor matrix = rhs.select(0, local);
      out.narrow(0, row, size)
          .copy_(bias.has_value() ? at::addmm(bias->select(0, local), rows, matrix) : at::mm(rows, matrix));
    }
    row += size;
  }
  return out;
}

Tensor gmm_backend(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
                   int64_t group_offset) {
  check(lhs, rhs, group_sizes, bias);
  if (!uses_kernels(lhs)) return gmm_aten(lhs, rhs, group_sizes, bias, group_offset);
  const Tensor out = empty({lhs.size(0), rhs.size(2)}, lhs.options());
  const Tensor left = gemm_operand(lhs);
  const Tensor right = gemm_operand(rhs);
  const Tensor sizes = group_sizes.contiguous();
  const auto offsets = bias.has_value() ? OptionalTensor(bias->contiguous()) : std::nullopt;
  for_dtype(lhs.scalar_type(), [&]<class T>() {
    maxmoe::gmm(Gmm<T>{const_view<T>(left), const_stack<T>(right),
                       offsets.has_value() ? const_view<T>(*offsets) : ConstMatrixView<T>{},
                       const_pointer<int64_t>(sizes), sizes.numel(), group_offset, &best_gemm<T>(), view<T>(out)},
                torch_executor());
  });
  return out;
}

class Gradient : public torch::autograd::Function<Gradient> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes,
                        const OptionalTensor& bias, int64_t group_offset) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({rhs.requires_grad() ? lhs : Tensor(), lhs.requires_grad() ? rhs : Tensor(), group_sizes});
    ctx->saved_data["has_bias_gradient"] = requires_grad(bias);
    ctx->saved_data["num_local_groups"] = rhs.size(0);
    ctx->saved_data["group_offset"] = group_offset;
    return ops::gmm(lhs, rhs, group_sizes, bias, group_offset);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor& lhs = saved[0];
    const Tensor& rhs = saved[1];
    const Tensor& group_sizes = saved[2];
    const Tensor& grad = grads[0];
    const int64_t num_local_groups = ctx->saved_data["num_local_groups"].toInt();
    const int64_t group_offset = ctx->saved_data["group_offset"].toInt();
    Tensor grad_lhs;
    Tensor grad_rhs;
    Tensor grad_bias;
    if (rhs.defined()) grad_lhs = gmm(grad, rhs.transpose(1, 2), group_sizes, std::nullopt, group_offset);
    if (lhs.defined()) grad_rhs = tgmm(lhs, grad, group_sizes, num_local_groups, group_offset);
    if (ctx->saved_data["has_bias_gradient"].toBool()) {
      const Tensor ones = at::ones_symint({grad.sym_size(0), 1}, grad.options());
      grad_bias = tgmm(ones, grad, group_sizes, num_local_groups, group_offset).squeeze(1);
    }
    return {grad_lhs, grad_rhs, Tensor(), grad_bias, Tensor()};
  }
};

Tensor gmm_autograd(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
                    int64_t group_offset) {
  if (needs_gradient(lhs, rhs, defined_or_empty(bias))) {
    return Gradient::apply(lhs, rhs, group_sizes, bias, group_offset);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return ops::gmm(lhs, rhs, group_sizes, bias, group_offset);
}

template <c10::DispatchKey key, c10::DeviceType device>
Tensor gmm_autocast(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
                    int64_t group_offset) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  return ops::gmm(autocast(lhs, device), autocast(rhs, device), group_sizes, autocast(bias, device), group_offset);
}

TORCH_LIBRARY_IMPL(maxmoe, CompositeExplicitAutograd, m) {
  m.impl("gmm", &gmm_backend);
}
TORCH_LIBRARY_IMPL(maxmoe, Autograd, m) {
  m.impl("gmm", &gmm_autograd);
}
TORCH_LIBRARY_IMPL(maxmoe, AutocastCPU, m) {
  m.impl("gmm", &gmm_autocast<c10::DispatchKey::AutocastCPU, c10::kCPU>);
}
TORCH_LIBRARY_IMPL(maxmoe, AutocastCUDA, m) {
  m.impl("gmm", &gmm_autocast<c10::DispatchKey::AutocastCUDA, c10::kCUDA>);
}

}  // namespace

Tensor gmm(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
           int64_t group_offset) {
  static const auto op = find_operator<decltype(gmm)>("maxmoe::gmm");
  return op.call(lhs, rhs, group_sizes, bias, group_offset);
}

}  // namespace maxmoe::ops
