// An allocator of large blocks in huge pages. Does not depend on torch.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <unordered_map>

namespace maxmoe::ops {

// The system clears every page that it maps, which takes longer than most operators need to write the page. So freed
// pages are kept and reused without clearing. The system may take kept pages back when memory runs short (MADV_FREE).
//
// A page is mapped only if no freed one is left, so that the number of mapped bytes never exceeds the largest number of
// bytes that were allocated at once. Freed pages that are not contiguous are moved together instead of mapping new
// ones.
class HugePages {
 public:
  // Never destroyed, because tensors are freed until the end of the process.
  static HugePages& instance();

  // A block of at least `bytes`, aligned to 2 MiB, with undefined content; nullptr if the system has no memory.
  void* allocate(size_t bytes);
  void deallocate(void* block);

  // Unmaps all freed pages.
  void empty_cache();

  size_t bytes_allocated();  // of all blocks
  size_t bytes_reserved();   // of all blocks and freed pages

 private:
  using Spans = std::map<std::byte*, size_t>;  // begin and size

  HugePages();
  std::byte* take(Spans::iterator span, size_t bytes);
  std::byte* take_best_fit(size_t bytes);
  std::byte* move_together(size_t bytes);
  void keep(std::byte* begin, size_t bytes);
  void unmap_freed();

  std::mutex mutex_;
  Spans freed_;  // neighbouring spans are merged
  std::unordered_map<void*, size_t> allocated_;
};

}  // namespace maxmoe::ops
