#include "ops/memory.h"

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/resize_cpu_dispatch.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/accumulate.h>

#include "ops/huge_pages.h"

namespace maxmoe::ops {
namespace {

// Smaller memory the C library mostly keeps by itself, and half a huge page more would be a lot.
constexpr size_t kSmallest = size_t{4} << 20;

void deallocate(void* block) {
  c10::profiledCPUMemoryReporter().Delete(block);
  HugePages::instance().deallocate(block);
}

// Of storages, which ask it again when they are resized.
class HugePageAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes < kSmallest ? nullptr : HugePages::instance().allocate(bytes);
    if (block == nullptr) return c10::GetCPUAllocator()->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(block, bytes);
    return {block, block, &deallocate, c10::kCPU};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

c10::Allocator* allocator() {
  static auto* const never_destroyed = new HugePageAllocator;
  return never_destroyed;
}

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  if (!options.device().is_cpu() || c10::multiply_integers(sizes) * c10::elementSize(dtype) < kSmallest) {
    return at::empty(sizes, options);
  }
  const at::Tensor tensor =
      at::detail::empty_generic({0}, allocator(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype, std::nullopt);
  // Fills the memory where torch.utils.deterministic.fill_uninitialized_memory asks for it, as at::empty does.
  return at::cpu::resize_(tensor, sizes);
}

}  // namespace maxmoe::ops
