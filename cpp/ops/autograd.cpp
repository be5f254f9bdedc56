#include "ops/autograd.h"

#include <ATen/FuncTorchTLS.h>

namespace maxmoe::ops {

void check_no_function_transform(const char* op) {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (!transforms) return;
  try {
    transforms->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    TORCH_CHECK_NOT_IMPLEMENTED(false, "maxmoe::", op,
                                ": gradients must be taken with torch.autograd, or in forward mode with torch.func.jvp "
                                "and jacfwd, got torch.func.grad, vjp, jacrev or another transform in reverse mode");
  }
}

bool is_transformed(const at::Tensor& grad) {
  // Of torch.func.vmap, and of torch.autograd.
  constexpr c10::DispatchKeySet batched({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});
  return at::GradMode::is_enabled() || has_tangent(grad) || grad.key_set().has_any(batched);
}

}  // namespace maxmoe::ops
