// Large blocks of memory in huge pages. No torch here.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <unordered_map>

namespace maxmoe::ops {

// The system clears every page that it maps, which takes longer than most operators take to write it. So freed pages
// are kept and given out again, as they are. While they are kept the system may take them (MADV_FREE): a process whose
// memory runs short loses them first.
//
// A page is mapped only when no freed one is left, so that mapped bytes never exceed the largest number of bytes that
// were allocated at once. Where freed pages suffice for a block but do not lie side by side they are moved, not mapped.
class HugePages {
 public:
  // Never destroyed: tensors are freed until the very end of the process.
  static HugePages& instance();

  // A block of at least this many bytes, aligned to 2 MiB; nullptr where the system has none. Its content is undefined.
  void* allocate(size_t bytes);
  void deallocate(void* block);

  // Unmaps all freed pages.
  void empty_cache();

  // Bytes of the blocks, and of everything mapped: blocks and freed pages.
  size_t bytes_allocated();
  size_t bytes_reserved();

 private:
  using Spans = std::map<std::byte*, size_t>;  // begin and size

  HugePages();
  std::byte* take(Spans::iterator span, size_t bytes);
  std::byte* take_best_fit(size_t bytes);
  std::byte* move_together(size_t bytes);
  void keep(std::byte* begin, size_t bytes);
  void unmap_freed();

  std::mutex mutex_;
  Spans freed_;  // no two are neighbours
  std::unordered_map<void*, size_t> allocated_;
};

}  // namespace maxmoe::ops
