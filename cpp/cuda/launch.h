// Starts kernels, on a stream of CUDA or in the emulator.
#pragma once

#include "cuda/device.h"
#include "cuda/kernels.h"

namespace maxmoe::cuda {

// Kernels with __launch_bounds__(kThreads, blocks) may use the registers of so many blocks at a time: with the default,
// ptxas spills some of them.
constexpr int kThreads = 256;  // per block
constexpr int kWarpsPerBlock = kThreads / kWarp;
constexpr size_t kMaxSharedBytes = 96 << 10;  // every device from sm_80 on has more

#ifdef __CUDACC__
constexpr int64_t max_blocks() {
  return std::numeric_limits<int>::max();
}

inline int64_t multiprocessors() {
  int device = 0;
  int count = 0;
  cudaGetDevice(&device);
  cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
  return count;
}

template <class... Parameters, class... Arguments>
void launch(const char* op, void (*kernel)(Parameters...), dim3 grid, dim3 threads, size_t shared_bytes, Stream stream,
            const Arguments&... arguments) {
  if (shared_bytes > size_t{48} << 10) {
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  }
  kernel<<<grid, threads, shared_bytes, static_cast<cudaStream_t>(stream)>>>(arguments...);
  if (const cudaError_t error = cudaGetLastError(); error != cudaSuccess) {
    throw std::runtime_error(std::string("maxmoe::") + op + ": " + cudaGetErrorString(error));
  }
}
#else
inline int64_t max_blocks() {
  return emulator::schedule.max_blocks;
}
inline int64_t multiprocessors() {
  return emulator::schedule.multiprocessors;
}

template <class... Parameters, class... Arguments>
void launch(const char* op, void (*kernel)(Parameters...), dim3 grid, dim3 threads, size_t shared_bytes,
            Stream /*stream*/, const Arguments&... arguments) {
  if (shared_bytes > kMaxSharedBytes) throw std::runtime_error(std::string("maxmoe::") + op + ": shared memory");
  emulator::traffic = &emulator::traffic_of[op];
  ++emulator::traffic->launches;
  emulator::run_grid(grid, threads, shared_bytes, [=] { kernel(arguments...); });
}
#endif

// Blocks of a grid in which each block takes `per_block` of `count` items; with fewer blocks, a block takes more.
inline dim3 grid_of(int64_t count, int64_t per_block) {
  return {static_cast<unsigned>(std::min((count + per_block - 1) / per_block, max_blocks()))};
}

// The shape of a block whose threads walk along rows of `vectors` vectors: a row for each threadIdx.y.
inline dim3 block_of_rows(int64_t vectors) {
  unsigned threads = kWarp;
  while (threads < kThreads && threads < vectors) threads *= 2;
  return {threads, kThreads / threads};
}

// Calls run.operator()<kWidth>() with the vector width if all rows are aligned, otherwise with 1.
template <class T, class Run>
void with_width(bool is_vectorized, const Run& run) {
  is_vectorized ? run.template operator()<kVectorWidth<T>>() : run.template operator()<1>();
}

// The first item of this warp, and the distance to its next one, if each warp takes one item at a time.
__device__ inline int64_t first_item_of_warp() {
  return (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarp;
}
__device__ inline int64_t items_of_all_warps() {
  return int64_t{gridDim.x} * blockDim.x / kWarp;
}

// The first row of this thread, and the distance to its next one, in a block of block_of_rows.
__device__ inline int64_t first_row_of_thread() {
  return int64_t{blockIdx.x} * blockDim.y + threadIdx.y;
}
__device__ inline int64_t rows_of_all_blocks() {
  return int64_t{gridDim.x} * blockDim.y;
}

}  // namespace maxmoe::cuda
