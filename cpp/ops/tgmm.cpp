#include "ops/tgmm.h"

#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "kernels/tgmm.h"
#include "ops/autograd.h"
#include "ops/backend.h"
#include "ops/checks.h"
#include "ops/gmm.h"
#include "ops/memory.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kOp = "tgmm";

TORCH_LIBRARY_FRAGMENT(maxmoe, m) {
  m.def("tgmm(Tensor lhs, Tensor rhs, Tensor group_sizes, int num_local_groups, *, int group_offset=0) -> Tensor");
}

void check(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, int64_t num_local_groups) {
  Argument(kOp, "lhs", lhs).has_dims(2, "[R, D]").is_floating();
  Argument(kOp, "rhs", rhs).has_dims(2, "[R, F]").has_dtype_of("lhs", lhs).is_on_device_of("lhs", lhs);
  Argument(kOp, "rhs", rhs).has_size(0, lhs.size(0), "R of lhs");
  MAXMOE_CHECK(num_local_groups >= 0, kOp, "num_local_groups must not be negative, got ", num_local_groups);
  check_group_sizes(kOp, group_sizes, lhs, lhs.size(0), Sum::at_most);
}

Tensor tgmm_aten(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, int64_t num_local_groups,
                 int64_t group_offset) {
  const Tensor out = at::zeros({num_local_groups, lhs.size(1), rhs.size(1)}, lhs.options());
  const Tensor sizes = group_sizes.cpu().contiguous();
  int64_t row = 0;
  for (int64_t group = 0; group < sizes.numel(); ++group) {
    const int64_t size = sizes.const_data_ptr<int64_t>()[group];
    const int64_t local = group - group_offset;
    if (size > 0 && local >= 0 && local < num_local_groups) {
      out.select(0, local).copy_(at::mm(lhs.narrow(0, row, size).t(), rhs.narrow(0, row, size)));
    }
    row += size;
  }
  return out;
}

Tensor tgmm_backend(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, int64_t num_local_groups,
                    int64_t group_offset) {
  check(lhs, rhs, group_sizes, num_local_groups);
  if (!uses_kernels(lhs)) return tgmm_aten(lhs, rhs, group_sizes, num_local_groups, group_offset);
  const Tensor out = empty({num_local_groups, lhs.size(1), rhs.size(1)}, lhs.options());
  const Tensor left = gemm_operand(lhs);
  const Tensor right = gemm_operand(rhs);
  const Tensor sizes = group_sizes.contiguous();
  for_dtype(lhs.scalar_type(), [&]<class T>() {
    maxmoe::tgmm(Tgmm<T>{const_view<T>(left), const_view<T>(right), const_pointer<int64_t>(sizes), sizes.numel(),
                         group_offset, &best_gemm<T>(), stack<T>(out)},
                 torch_executor());
  });
  return out;
}

class Gradient : public torch::autograd::Function<Gradient> {
 public:
  static Tensor forward(AutogradContext* ctx, const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes,
                        int64_t num_local_groups, int64_t group_offset) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    ctx->save_for_backward({rhs.requires_grad() ? lhs : Tensor(), lhs.requires_grad() ? rhs : Tensor(), group_sizes});
    ctx->saved_data["group_offset"] = group_offset;
    return ops::tgmm(lhs, rhs, group_sizes, num_local_groups, group_offset);
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const Tensor& lhs = saved[0];
    const Tensor& rhs = saved[1];
    const Tensor& group_sizes = saved[2];
    const int64_t group_offset = ctx->saved_data["group_offset"].toInt();
    Tensor grad_lhs;
    Tensor grad_rhs;
    if (rhs.defined()) grad_lhs = gmm(rhs, grads[0].transpose(1, 2), group_sizes, std::nullopt, group_offset);
    if (lhs.defined()) grad_rhs = gmm(lhs, grads[0], group_sizes, std::nullopt, group_offset);
    return {grad_lhs, grad_rhs, Tensor(), Tensor(), Tensor()};
  }
};

Tensor tgmm_autograd(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, int64_t num_local_groups,
                     int64_t group_offset) {
  if (needs_gradient(lhs, rhs)) return Gradient::apply(lhs, rhs, group_sizes, num_local_groups, group_offset);
  const at::AutoDispatchBelowADInplaceOrView guard;
  return ops::tgmm(lhs, rhs, group_sizes, num_local_groups, group_offset);
}

template <c10::DispatchKey key, c10::DeviceType device>
Tensor tgmm_autocast(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, int64_t num_local_groups,
                     int64_t group_offset) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  return ops::tgmm(autocast(lhs, device), autocast(rhs, device), group_sizes, num_local_groups, group_offset);
}

TORCH_LIBRARY_IMPL(maxmoe, CompositeExplicitAutograd, m) {
  m.impl("tgmm", &tgmm_backend);
}
TORCH_LIBRARY_IMPL(maxmoe, Autograd, m) {
  m.impl("tgmm", &tgmm_autograd);
}
TORCH_LIBRARY_IMPL(maxmoe, AutocastCPU, m) {
  m.impl("tgmm", &tgmm_autocast<c10::DispatchKey::AutocastCPU, c10::kCPU>);
}
TORCH_LIBRARY_IMPL(maxmoe, AutocastCUDA, m) {
  m.impl("tgmm", &tgmm_autocast<c10::DispatchKey::AutocastCUDA, c10::kCUDA>);
}

}  // namespace

Tensor tgmm(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes, int64_t num_local_groups,
            int64_t group_offset) {
  static const auto op = find_operator<decltype(tgmm)>("maxmoe::tgmm");
  return op.call(lhs, rhs, group_sizes, num_local_groups, group_offset);
}

}  // namespace maxmoe::ops
