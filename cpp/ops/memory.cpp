#include "ops/memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/accumulate.h>

#include "ops/huge_pages.h"
#include "ops/torch_internals.h"

namespace maxmoe::ops {
namespace {

// Smaller blocks come from torch's allocator: malloc mostly reuses freed blocks of this size, and rounding them up to
// huge pages would waste much of their memory.
constexpr size_t kSmallest = size_t{4} << 20;

// Reports before it frees the block, because another thread may then allocate the same address at once.
void deallocate(void* block) {
  torch_internals::report_deallocated(block);
  HugePages::instance().deallocate(block);
}

// The allocator of the storages of large tensors. A storage calls it again when it is resized.
class HugePageAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes < kSmallest ? nullptr : HugePages::instance().allocate(bytes);
    if (block == nullptr) return c10::GetCPUAllocator()->allocate(bytes);
    torch_internals::report_allocated(block, bytes);
    return {block, block, &deallocate, c10::kCPU};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

c10::Allocator* allocator() {
  static auto* const never_destroyed = new HugePageAllocator;  // storages call it until the end of the process
  return never_destroyed;
}

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  if (!options.device().is_cpu() || c10::multiply_integers(sizes) * c10::elementSize(dtype) < kSmallest) {
    return at::empty(sizes, options);
  }
  // resize_ fills the memory if torch.utils.deterministic.fill_uninitialized_memory asks for it, as at::empty does.
  return torch_internals::empty(dtype, allocator()).resize_(sizes);
}

}  // namespace maxmoe::ops
