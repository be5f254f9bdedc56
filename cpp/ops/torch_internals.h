// Every name of torch that PyTorch does not document for C++ extensions. The other files of cpp/ use the functions here
// (tests/repository/test_layout.py), so that a new version of torch can break this file alone. They compile unchanged
// with torch 2.13, 2.14 and 2.15.
//
// "Public" names the public alternative and the first version of torch that has it.
#pragma once

#include <ATen/EmptyTensor.h>
#include <ATen/FuncTorchTLS.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/_assert_async.h>
#include <ATen/ops/_grouped_mm.h>
#include <ATen/ops/_make_dual.h>
#include <ATen/ops/_softmax_backward_data.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/csrc/autograd/graph_task.h>

#include <string>

namespace maxmoe::torch_internals {

using at::Tensor;

// Forward-mode AD. torch supports one level of it. Public: torch.autograd.forward_ad in Python, since 1.11.

// The tangent of a tensor, undefined if it has none.
inline const Tensor& tangent(const Tensor& tensor) {
  return tensor._fw_grad(/*level=*/0);
}

// The tensor without its tangent.
inline Tensor primal(const Tensor& tensor) {
  return tensor._fw_primal(/*level=*/0);
}

inline Tensor make_dual(const Tensor& primal, const Tensor& tangent) {
  return at::_make_dual(primal, tangent, /*level=*/0);
}

// Results have no tangents while an instance exists. Public: none.
class NoTangents {
  c10::AutoFwGradMode guard_{false};
};

// Casts a tensor to the dtype of autocast. Public: torch.library.register_autocast in Python, since 2.6. It casts all
// tensors to a dtype that is fixed at registration, but our operators do not cast `weights`, and the user sets the
// dtype.
template <c10::DeviceType device, class T>
T cast_for_autocast(const T& argument) {
  return at::autocast::cached_cast(at::autocast::get_autocast_dtype(device), argument, device);
}

// Autocast is off on all devices while an instance exists. Public: torch.autocast(device, enabled=False) in Python,
// since 1.10.
class NoAutocast {
  c10::impl::ExcludeDispatchKeyGuard guard_{c10::autocast_dispatch_keyset};
};

// Whether the tensor is a batch under torch.func.vmap, or under torch.autograd with is_grads_batched. Public: none.
inline bool is_batched(const Tensor& tensor) {
  constexpr c10::DispatchKeySet batched({c10::DispatchKey::FuncTorchBatched, c10::DispatchKey::Batched});
  return tensor.key_set().has_any(batched);
}

// Whether the running backward pass keeps the graph (retain_graph), so that it may run again. Public: none.
inline bool keeps_graph() {
  return torch::autograd::get_current_graph_task_keep_graph();
}

// Whether a torch::autograd::Function can be recorded, which torch.func.grad, vjp and jacrev do not support. Public:
// none; the error of Function::apply does not name the operator.
inline bool supports_autograd_function() {
  const auto& transforms = at::functorch::functorchTLSAccessor();
  if (!transforms) return true;
  try {
    transforms->checkSupportsCppAutogradFunction();
  } catch (const c10::Error&) {
    return false;
  }
  return true;
}

// The matrix products of groups of rows, in one kernel on the devices that docs/devices.md lists. Public:
// torch.nn.functional.grouped_mm in Python, since 2.10, which calls this function.
inline Tensor grouped_mm(const Tensor& lhs, const Tensor& rhs, const Tensor& ends) {
  return at::_grouped_mm(lhs, rhs, ends);
}

// The gradient of logits from the gradient of their softmax over the last dim, in one kernel. Public: none.
inline Tensor softmax_backward(const Tensor& grad, const Tensor& softmax) {
  return at::_softmax_backward_data(grad, softmax, -1, softmax.scalar_type());
}

// An assertion that the device checks asynchronously. Public: none; torch.Tensor.item waits for the device.
inline void assert_async(const Tensor& condition, const std::string& message) {
  at::_assert_async(condition, message);
}

// The current stream of a device, as a handle of the driver. Public: c10/cuda/CUDAStream.h, which needs headers
// of CUDA and a torch that was built for it.
inline void* current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device).native_handle();
}

// A tensor of size [0] on the CPU, whose memory comes from `allocator` when it is resized. Public: at::from_blob, whose
// memory cannot be resized.
inline Tensor empty(at::ScalarType type, c10::Allocator* allocator) {
  return at::detail::empty_generic({0}, allocator, c10::DispatchKeySet(c10::DispatchKey::CPU), type, std::nullopt);
}

// at::empty on the CPU without the dispatcher, for kernels: it has called them, and dispatch modes do not see what they
// call. Public: at::empty, which takes twice the time.
inline Tensor empty_on_cpu(at::IntArrayRef sizes, const at::TensorOptions& options) {
  return at::cpu::empty(sizes, options);
}

// Report memory of other allocators than torch's to torch.profiler (profile_memory). Public: none.
inline void report_allocated(void* block, size_t bytes) {
  c10::profiledCPUMemoryReporter().New(block, bytes);
}
inline void report_deallocated(void* block) {
  c10::profiledCPUMemoryReporter().Delete(block);
}

}  // namespace maxmoe::torch_internals
