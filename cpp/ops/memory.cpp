#include "ops/memory.h"

#include <ATen/ops/empty.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/accumulate.h>
#include <pthread.h>
#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <map>
#include <mutex>
#include <numeric>
#include <unordered_map>

#include "ops/torch_internals.h"

namespace maxmoe::ops {
namespace {

// The size of a huge page on most processors. It is a multiple of the size of ordinary pages on all of them.
constexpr size_t kPageSize = size_t{2} << 20;

size_t sum_of_sizes(const auto& spans) {
  return std::accumulate(spans.begin(), spans.end(), size_t{0},
                         [](size_t sum, const auto& span) { return sum + span.second; });
}

// Maps new pages, aligned to kPageSize: maps one page more and unmaps the memory outside of the aligned range. nullptr
// if it fails.
std::byte* map(size_t bytes) {
  void* memory = mmap(nullptr, bytes + kPageSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(memory);
  const size_t before = -std::bit_cast<uintptr_t>(memory) % kPageSize;
  if (before > 0) munmap(begin, before);
  munmap(begin + before + bytes, kPageSize - before);
  madvise(begin + before, bytes, MADV_HUGEPAGE);  // may fail: ordinary pages work too
  return begin + before;
}

// Moves pages to the address `to`, and unmaps the previous pages there. One page at a time, because they may belong to
// several mappings, which Linux before 6.17 does not move in one call.
bool move_pages(std::byte* from, size_t bytes, std::byte* to) {
  for (size_t i = 0; i < bytes; i += kPageSize) {
    if (mremap(from + i, kPageSize, kPageSize, MREMAP_MAYMOVE | MREMAP_FIXED, to + i) == MAP_FAILED) {
      munmap(from + i, bytes - i);
      return false;
    }
  }
  return true;
}

// Smaller blocks come from torch's allocator: rounding them up to huge pages would more than double their memory.
// Larger ones do not come from there, because malloc may return freed blocks to the system, by chance of what else is
// in its heap: then every step maps and clears their pages again.
constexpr size_t kSmallest = kPageSize / 2;

// The allocator of the storages of large tensors: blocks in huge pages, reused. A storage calls it again when it is
// resized.
//
// The system clears every page that it maps, which takes longer than most operators need to write the page. So freed
// pages are kept and reused without clearing. The system may take kept pages back when memory runs short (MADV_FREE).
//
// A page is mapped only if no freed one is left, so that the number of mapped bytes never exceeds the largest number of
// bytes that were allocated at once. Freed pages that are not contiguous are moved together instead of mapping new
// ones.
class HugePages final : public c10::Allocator {
 public:
  // Never destroyed, because storages call it until the end of the process.
  static HugePages& instance() {
    static HugePages& pages = *new HugePages;
    return pages;
  }

  c10::DataPtr allocate(size_t bytes) override {
    void* block = bytes < kSmallest ? nullptr : take_block(bytes);
    if (block == nullptr) return c10::GetCPUAllocator()->allocate(bytes);
    torch_internals::report_allocated(block, bytes);
    return {block, block, &deallocate, c10::kCPU};
  }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  void empty_cache() {
    const std::lock_guard lock(mutex_);
    unmap_freed();
  }

  size_t bytes_allocated() {
    const std::lock_guard lock(mutex_);
    return sum_of_sizes(allocated_);
  }

  size_t bytes_reserved() {
    const std::lock_guard lock(mutex_);
    return sum_of_sizes(allocated_) + sum_of_sizes(freed_);
  }

 private:
  using Spans = std::map<std::byte*, size_t>;  // begin and size

  // Holds the lock during fork(). Otherwise another thread may hold it at that moment, and the child, which does not
  // have this thread, would wait for it forever.
  HugePages() {
    constexpr auto unlock = [] { instance().mutex_.unlock(); };
    pthread_atfork([] { instance().mutex_.lock(); }, unlock, unlock);
  }

  // A block of at least `bytes`, aligned to 2 MiB, with undefined content; nullptr if the system has no memory.
  void* take_block(size_t bytes) {
    bytes = (bytes + kPageSize - 1) / kPageSize * kPageSize;
    const std::lock_guard lock(mutex_);
    std::byte* block = take_best_fit(bytes);
    if (block == nullptr) block = move_together(bytes);
    if (block == nullptr) {  // freed pages count towards a limit of mapped memory (ulimit -v)
      unmap_freed();
      block = map(bytes);
    }
    if (block != nullptr) allocated_.emplace(block, bytes);
    return block;
  }

  // Reports before it frees the block, because another thread may then allocate the same address at once.
  static void deallocate(void* block) {
    torch_internals::report_deallocated(block);
    instance().free_block(block);
  }

  void free_block(void* block) {
    const std::lock_guard lock(mutex_);
    const size_t bytes = allocated_.extract(block).mapped();
    // The system may reclaim the pages until they are written again.
    if (madvise(block, bytes, MADV_FREE) == 0) {
      keep(static_cast<std::byte*>(block), bytes);
    } else {
      munmap(block, bytes);
    }
  }

  // Takes the first bytes of a freed span.
  std::byte* take(Spans::iterator span, size_t bytes) {
    const auto [begin, size] = *span;
    const auto next = freed_.erase(span);
    if (size > bytes) freed_.emplace_hint(next, begin + bytes, size - bytes);
    return begin;
  }

  // Takes a block from the smallest freed span that is large enough; nullptr if there is none.
  std::byte* take_best_fit(size_t bytes) {
    auto best = freed_.end();
    for (auto span = freed_.begin(); span != freed_.end(); ++span) {
      if (span->second >= bytes && (best == freed_.end() || span->second < best->second)) best = span;
    }
    return best == freed_.end() ? nullptr : take(best, bytes);
  }

  // Maps a new block and replaces its pages by freed ones, as far as there are any. The smallest spans go first, so
  // that large ones stay for blocks that fit. nullptr if it fails.
  std::byte* move_together(size_t bytes) {
    std::byte* block = map(bytes);
    if (block == nullptr) return nullptr;
    for (size_t filled = 0; filled < bytes && !freed_.empty();) {
      const auto smallest = std::ranges::min_element(freed_, {}, &Spans::value_type::second);
      const size_t moved = std::min(smallest->second, bytes - filled);
      if (!move_pages(take(smallest, moved), moved, block + filled)) {
        munmap(block, bytes);
        return nullptr;
      }
      filled += moved;
    }
    return block;
  }

  // Adds a span to the freed ones, merged with its neighbours.
  void keep(std::byte* begin, size_t bytes) {
    auto next = freed_.lower_bound(begin);
    if (next != freed_.end() && begin + bytes == next->first) {
      bytes += next->second;
      next = freed_.erase(next);
    }
    if (next != freed_.begin() && std::prev(next)->first + std::prev(next)->second == begin) {
      std::prev(next)->second += bytes;
    } else {
      freed_.emplace_hint(next, begin, bytes);
    }
  }

  void unmap_freed() {
    for (const auto& [begin, bytes] : freed_) munmap(begin, bytes);
    freed_.clear();
  }

  std::mutex mutex_;
  Spans freed_;  // neighbouring spans are merged
  std::unordered_map<void*, size_t> allocated_;
};

}  // namespace

at::Tensor empty(at::IntArrayRef sizes, const at::TensorOptions& options) {
  if (!options.device().is_cpu()) return at::empty(sizes, options);
  const at::ScalarType dtype = c10::typeMetaToScalarType(options.dtype());
  if (c10::multiply_integers(sizes) * c10::elementSize(dtype) < kSmallest) {
    return torch_internals::empty_on_cpu(sizes, options);
  }
  // resize_ fills the memory if torch.utils.deterministic.fill_uninitialized_memory asks for it, as at::empty does.
  return torch_internals::empty(dtype, &HugePages::instance()).resize_(sizes);
}

void empty_cache() {
  HugePages::instance().empty_cache();
}

size_t bytes_allocated() {
  return HugePages::instance().bytes_allocated();
}

size_t bytes_reserved() {
  return HugePages::instance().bytes_reserved();
}

}  // namespace maxmoe::ops
