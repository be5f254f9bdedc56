// Makes the tests of the CUDA kernels run on a GPU (`make cuda-tests`): all memory of the program is managed memory,
// which host and device both read. Kernels get pointers to vectors and matrices of the tests. Run with
// CUDA_LAUNCH_BLOCKING=1, so that a kernel has ended when its function returns. Freed memory is not returned to CUDA,
// but reused by later blocks.
#include <cuda_runtime_api.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <new>

namespace {

constexpr size_t kPoolBytes = size_t{4} << 30;
constexpr size_t kHeaderBytes = 128;  // before each block; keeps blocks aligned

struct FreeBlock {
  FreeBlock* next;
};

std::mutex mutex;
std::byte* pool = nullptr;
size_t used_bytes = 0;
FreeBlock* free_blocks[64] = {};  // of 2^i bytes

std::byte* new_pool() {
  void* memory = nullptr;
  const cudaError_t error = cudaMallocManaged(&memory, kPoolBytes, cudaMemAttachGlobal);
  if (error == cudaSuccess) return static_cast<std::byte*>(memory);
  std::fprintf(stderr, "no managed memory: %s\n", cudaGetErrorString(error));
  std::_Exit(77);
}

void* allocate(size_t bytes) {
  const std::lock_guard<std::mutex> lock(mutex);
  const int order = std::bit_width(bytes < kHeaderBytes ? kHeaderBytes - 1 : bytes - 1);
  if (FreeBlock* block = free_blocks[order]; block != nullptr) {
    free_blocks[order] = block->next;
    return block;
  }
  if (pool == nullptr) pool = new_pool();
  std::byte* const header = pool + used_bytes;
  used_bytes += kHeaderBytes + (size_t{1} << order);
  if (used_bytes > kPoolBytes) std::abort();
  new (header) int(order);
  return header + kHeaderBytes;
}

void release(void* memory) {
  if (memory == nullptr) return;
  const std::lock_guard<std::mutex> lock(mutex);
  const int order = *reinterpret_cast<int*>(static_cast<std::byte*>(memory) - kHeaderBytes);
  free_blocks[order] = new (memory) FreeBlock{free_blocks[order]};
}

}  // namespace

void* operator new(size_t bytes) {
  return allocate(bytes);
}
void* operator new(size_t bytes, std::align_val_t /*alignment*/) {
  return allocate(bytes);
}
void operator delete(void* memory) noexcept {
  release(memory);
}
void operator delete(void* memory, size_t /*bytes*/) noexcept {
  release(memory);
}
void operator delete(void* memory, std::align_val_t /*alignment*/) noexcept {
  release(memory);
}
void operator delete(void* memory, size_t /*bytes*/, std::align_val_t /*alignment*/) noexcept {
  release(memory);
}
