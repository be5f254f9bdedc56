#include "ops/memory.h"

#include <ATen/ops/empty.h>

#include <bit>
#include <cstdint>

#ifdef __linux__
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace maxmoe::ops {
namespace {

// Holds one huge page at least, wherever it begins.
constexpr size_t kWorthHugePages = size_t{4} << 20;

// The C library maps large memory anew for every tensor, and the first touch of each page is a fault: with pages of
// 4 KiB faults take longer than writing what the pages hold. A request only: memory is right without it.
void request_huge_pages([[maybe_unused]] void* memory, [[maybe_unused]] size_t bytes) {
#ifdef MADV_HUGEPAGE
  static const auto page_size = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = std::bit_cast<uintptr_t>(memory);
  const uintptr_t first_page = (begin + page_size - 1) / page_size * page_size;
  madvise(std::bit_cast<void*>(first_page), begin + bytes - first_page, MADV_HUGEPAGE);
#endif
}

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  at::Tensor tensor = at::empty(sizes, options);
  if (tensor.is_cpu() && tensor.nbytes() >= kWorthHugePages) {
    request_huge_pages(tensor.mutable_data_ptr(), tensor.nbytes());
  }
  return tensor;
}

}  // namespace maxmoe::ops
