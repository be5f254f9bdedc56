#include "ops/torch_internals.h"

#include <ATen/EmptyTensor.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/native/CPUBlas.h>
#include <ATen/ops/_assert_async.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>

namespace maxmoe::torch_internals {

bool keeps_graph() {
  return torch::autograd::get_current_graph_task_keep_graph();
}

bool supports_autograd_function() {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (!transforms) return true;
  try {
    transforms->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

void assert_async(const Tensor& condition, const std::string& message) {
  at::_assert_async(condition, message);
}

bool has_matrix_units(at::ScalarType type) {
  return at::native::cpublas::could_pack(type);
}

void* current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

Tensor empty(at::ScalarType type, c10::Allocator* allocator) {
  return at::detail::empty_generic({0}, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), type, std::nullopt);
}

void report_allocated(void* block, size_t bytes) {
  c10::profiledCPUMemoryReporter().New(block, bytes);
}

void report_deallocated(void* block) {
  c10::profiledCPUMemoryReporter().Delete(block);
}

}  // namespace maxmoe::torch_internals
