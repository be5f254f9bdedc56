#include "ops/huge_pages.h"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <iterator>
#include <numeric>

#ifdef __linux__
#include <pthread.h>
#include <sys/mman.h>
#endif

namespace maxmoe::ops {
namespace {

// The size of a huge page on most processors. It is a multiple of the size of ordinary pages on all of them.
constexpr size_t kPageSize = size_t{2} << 20;

size_t sum_of_sizes(const auto& spans) {
  return std::accumulate(spans.begin(), spans.end(), size_t{0},
                         [](size_t sum, const auto& span) { return sum + span.second; });
}

#if defined(__linux__) && defined(MADV_FREE) && defined(MADV_HUGEPAGE)

void unmap(void* begin, size_t bytes) {
  munmap(begin, bytes);
}

// Maps new pages, aligned to kPageSize: maps one page more and unmaps the memory outside of the aligned range. nullptr
// if it fails.
std::byte* map(size_t bytes) {
  void* memory = mmap(nullptr, bytes + kPageSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) return nullptr;
  auto* begin = static_cast<std::byte*>(memory);
  const size_t before = -std::bit_cast<uintptr_t>(memory) % kPageSize;
  if (before > 0) unmap(begin, before);
  unmap(begin + before + bytes, kPageSize - before);
  madvise(begin + before, bytes, MADV_HUGEPAGE);  // may fail: ordinary pages work too
  return begin + before;
}

// Allows the system to reclaim the pages until they are written again.
bool offer_to_system(void* begin, size_t bytes) {
  return madvise(begin, bytes, MADV_FREE) == 0;
}

// Moves pages to the address `to`, and unmaps the previous pages there. One page at a time, because they may belong to
// several mappings, which Linux before 6.17 does not move in one call.
bool move_pages(std::byte* from, size_t bytes, std::byte* to) {
  for (size_t i = 0; i < bytes; i += kPageSize) {
    if (mremap(from + i, kPageSize, kPageSize, MREMAP_MAYMOVE | MREMAP_FIXED, to + i) == MAP_FAILED) {
      unmap(from + i, bytes - i);
      return false;
    }
  }
  return true;
}

// Holds the lock during fork(). Otherwise another thread may hold it at that moment, and the child, which does not have
// this thread, would wait for it forever.
void hold_during_fork(void (*lock)(), void (*unlock)()) {
  pthread_atfork(lock, unlock, unlock);
}

#else

void unmap(void*, size_t) {}
std::byte* map(size_t) {
  return nullptr;
}
bool offer_to_system(void*, size_t) {
  return false;
}
bool move_pages(std::byte*, size_t, std::byte*) {
  return false;
}
void hold_during_fork(void (*)(), void (*)()) {}

#endif

}  // namespace

HugePages& HugePages::instance() {
  static HugePages& pages = *new HugePages;
  return pages;
}

HugePages::HugePages() {
  hold_during_fork([] { instance().mutex_.lock(); }, [] { instance().mutex_.unlock(); });
}

void* HugePages::allocate(size_t bytes) {
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

void HugePages::deallocate(void* block) {
  const std::lock_guard lock(mutex_);
  const size_t bytes = allocated_.extract(block).mapped();
  if (offer_to_system(block, bytes)) {
    keep(static_cast<std::byte*>(block), bytes);
  } else {
    unmap(block, bytes);
  }
}

void HugePages::empty_cache() {
  const std::lock_guard lock(mutex_);
  unmap_freed();
}

size_t HugePages::bytes_allocated() {
  const std::lock_guard lock(mutex_);
  return sum_of_sizes(allocated_);
}

size_t HugePages::bytes_reserved() {
  const std::lock_guard lock(mutex_);
  return sum_of_sizes(allocated_) + sum_of_sizes(freed_);
}

// Takes the first bytes of a freed span.
std::byte* HugePages::take(Spans::iterator span, size_t bytes) {
  const auto [begin, size] = *span;
  const auto next = freed_.erase(span);
  if (size > bytes) freed_.emplace_hint(next, begin + bytes, size - bytes);
  return begin;
}

// Takes a block from the smallest freed span that is large enough; nullptr if there is none.
std::byte* HugePages::take_best_fit(size_t bytes) {
  auto best = freed_.end();
  for (auto span = freed_.begin(); span != freed_.end(); ++span) {
    if (span->second >= bytes && (best == freed_.end() || span->second < best->second)) best = span;
  }
  return best == freed_.end() ? nullptr : take(best, bytes);
}

// Maps a new block and replaces its pages by freed ones, as far as there are any. The smallest spans go first, so that
// large ones stay for blocks that fit. nullptr if it fails.
std::byte* HugePages::move_together(size_t bytes) {
  std::byte* block = map(bytes);
  if (block == nullptr) return nullptr;
  for (size_t filled = 0; filled < bytes && !freed_.empty();) {
    const auto smallest = std::ranges::min_element(freed_, {}, &Spans::value_type::second);
    const size_t moved = std::min(smallest->second, bytes - filled);
    if (!move_pages(take(smallest, moved), moved, block + filled)) {
      unmap(block, bytes);
      return nullptr;
    }
    filled += moved;
  }
  return block;
}

// Adds a span to the freed ones, merged with its neighbours.
void HugePages::keep(std::byte* begin, size_t bytes) {
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

void HugePages::unmap_freed() {
  for (const auto& [begin, bytes] : freed_) unmap(begin, bytes);
  freed_.clear();
}

}  // namespace maxmoe::ops
