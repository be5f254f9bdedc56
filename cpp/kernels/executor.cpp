#include "kernels/executor.h"

#include <array>
#include <memory>
#include <new>

namespace maxmoe {
namespace {

constexpr std::align_val_t kAlignment{64};  // a cache line, and a vector of AVX-512

// Memory from the aligned operator new must be freed by the aligned operator delete.
struct AlignedDelete {
  void operator()(std::byte* memory) const { ::operator delete(memory, kAlignment); }
};

struct Buffer {
  std::unique_ptr<std::byte, AlignedDelete> memory;
  size_t size = 0;
};

}  // namespace

int64_t SerialExecutor::num_threads() const {
  return 1;
}

void SerialExecutor::run(int64_t count, const Task& task) const {
  for (int64_t index = 0; index < count; ++index) task(index);
}

void* scratch_bytes(int slot, size_t bytes) {
  // One set of buffers per thread: no locks, and on a NUMA system the pages are first touched by the thread that uses
  // them.
  thread_local std::array<Buffer, kScratchSlots> buffers;
  Buffer& buffer = buffers.at(static_cast<size_t>(slot));
  if (buffer.size < bytes) {
    buffer.memory.reset();  // freed before the allocation, so that both never exist at once
    buffer.size = 0;
    buffer.memory.reset(static_cast<std::byte*>(::operator new(bytes, kAlignment)));
    buffer.size = bytes;
  }
  return buffer.memory.get();
}

}  // namespace maxmoe
