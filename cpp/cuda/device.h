// The functions of CUDA that kernels use. nvcc compiles them to instructions; any other compiler includes the emulator,
// which runs them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <stdexcept>
#include <string>

#include "kernels/matrix/dtype.h"
#include "kernels/matrix/matrix_view.h"

#ifdef __CUDACC__
#include <cuda_runtime.h>
#define MAXMOE_SHARED_MEMORY(name) extern __shared__ __align__(128) unsigned char name[]
#define MAXMOE_UNROLL _Pragma("unroll")
#else
#include "cuda/emulated_functions.h"
#define MAXMOE_SHARED_MEMORY(name) unsigned char* const name = emulator::shared_memory()
#define MAXMOE_UNROLL
#endif

// An assertion of the device: ends the kernel with a message that names operator and argument.
#if defined(__CUDA_ARCH__)
#define MAXMOE_DEVICE_CHECK(condition, message) \
  (static_cast<bool>(condition) ? (void)0 : __assert_fail(message, __FILE__, __LINE__, ""))
#elif defined(__CUDACC__)
#define MAXMOE_DEVICE_CHECK(condition, message) ((void)0)
#else
#define MAXMOE_DEVICE_CHECK(condition, message) \
  (static_cast<bool>(condition) ? (void)0 : emulator::fail_assertion(message))
#endif

namespace maxmoe::cuda {

constexpr int kWarp = 32;
constexpr uint32_t kAllLanes = 0xffffffff;

__device__ inline int lane_index() {
  return static_cast<int>(threadIdx.x % kWarp);
}

// T to Accumulator<T> and back: one instruction each on the device, the functions of the CPU kernels elsewhere.
template <class T>
__device__ inline Accumulator<T> to_wide(T value) {
#ifdef __CUDA_ARCH__
  if constexpr (std::is_same_v<T, BFloat16>) return __uint_as_float(uint32_t{value.bits} << 16);
  if constexpr (std::is_same_v<T, Float16>) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(value.bits));
    return wide;
  }
  if constexpr (sizeof(T) >= 4) return value;
#else
  return widen(value);
#endif
}

template <class T>
__device__ inline T to_narrow(Accumulator<T> value) {
#ifdef __CUDA_ARCH__
  if constexpr (sizeof(T) >= 4) {
    return value;
  } else {
    T result;
    if constexpr (std::is_same_v<T, BFloat16>) asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    if constexpr (std::is_same_v<T, Float16>) asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
    return result;
  }
#else
  return narrow<T>(value);
#endif
}

#ifdef __CUDACC__
// exp(x) with an error of at most 2 + |1.173 x| units of float32, and 1 / x with one of at most 1 unit.
MAXMOE_DEVICE inline float approximate_exp(float x) {
#ifdef __CUDA_ARCH__
  return __expf(x);
#else
  return std::exp(x);
#endif
}
MAXMOE_DEVICE inline float approximate_inverse(float x) {
#ifdef __CUDA_ARCH__
  float inverse;
  asm("rcp.approx.f32 %0, %1;" : "=f"(inverse) : "f"(x));
  return inverse;
#else
  return 1 / x;
#endif
}
#endif

// A thread reads and writes vectors of 16 bytes where rows are aligned to 16 bytes, single numbers elsewhere.
template <class T>
constexpr int kVectorWidth = 16 / sizeof(T);

template <class T>
bool is_aligned(const MatrixView<T>& matrix) {
  constexpr int64_t width = 16 / static_cast<int64_t>(sizeof(T));
  return reinterpret_cast<uintptr_t>(matrix.data) % 16 == 0 && matrix.column_stride == 1 &&
         matrix.row_stride % width == 0 && matrix.columns % width == 0;
}

// To and from global memory.
template <class T, int kWidth>
__device__ inline void load(const T* from, T (&to)[kWidth]) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isGlobal(from));  // otherwise the address space of a selected pointer is found out at run time
#elif !defined(__CUDACC__)
  emulator::traffic->loaded += sizeof(to);
#endif
  if constexpr (kWidth == 1) {
    to[0] = *from;
  } else {
    static_assert(kWidth * sizeof(T) == 16);
#ifdef __CUDACC__
    const uint4 words = *reinterpret_cast<const uint4*>(from);
    memcpy(to, &words, 16);
#else
    check_alignment(from, "a load of an address that is not aligned");
    std::memcpy(to, from, 16);
#endif
  }
}

template <class T, int kWidth>
__device__ inline void store(T* to, const T (&from)[kWidth]) {
#ifndef __CUDACC__
  emulator::traffic->stored += sizeof(from);
#endif
  if constexpr (kWidth == 1) {
    *to = from[0];
  } else {
    static_assert(kWidth * sizeof(T) == 16);
#ifdef __CUDACC__
    uint4 words;
    memcpy(&words, from, 16);
    *reinterpret_cast<uint4*>(to) = words;
#else
    check_alignment(to, "a store to an address that is not aligned");
    std::memcpy(to, from, 16);
#endif
  }
}

// Sums over the lanes of a warp in a fixed order; every lane gets the same bits.
template <class T>
__device__ inline T warp_sum(T value) {
  MAXMOE_UNROLL
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value += __shfl_xor_sync(kAllLanes, value, lanes);
  return value;
}

template <class T>
__device__ inline T warp_max(T value) {
  MAXMOE_UNROLL
  for (int lanes = kWarp / 2; lanes > 0; lanes /= 2) value = std::fmax(value, __shfl_xor_sync(kAllLanes, value, lanes));
  return value;
}

// The sum over this lane and the lanes before it.
__device__ inline int64_t warp_inclusive_sum(int64_t value) {
  MAXMOE_UNROLL
  for (unsigned distance = 1; distance < kWarp; distance *= 2) {
    const int64_t before = __shfl_up_sync(kAllLanes, value, distance);
    if (lane_index() >= static_cast<int>(distance)) value += before;
  }
  return value;
}

// The sum over this thread and the threads before it in a block of whole warps, and over all of its threads.
struct BlockSum {
  int64_t inclusive;
  int64_t of_block;
};
// All threads of the block call it, with memory of the block for a number of each warp.
__device__ inline BlockSum block_inclusive_sum(int64_t value, int64_t* sums_of_warps) {
  const unsigned warp = threadIdx.x / kWarp;
  const int64_t sum = warp_inclusive_sum(value);
  if (lane_index() == kWarp - 1) sums_of_warps[warp] = sum;
  __syncthreads();  // all sums are written
  int64_t before = 0;
  int64_t all = 0;
  for (unsigned w = 0; w < blockDim.x / kWarp; ++w) {
    if (w == warp) before = all;
    all += sums_of_warps[w];
  }
  __syncthreads();  // the next call overwrites the sums
  return {before + sum, all};
}

#ifdef __CUDACC__
__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// Four 8 x 8 matrices of 16-bit numbers; lane i gives the address of row i % 8 of matrix i / 8.
template <bool kTransposed>
__device__ inline void load_matrices(uint32_t (&registers)[4], const void* row) {
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(shared_address(row))
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(registers[0]), "=r"(registers[1]), "=r"(registers[2]), "=r"(registers[3])
                 : "r"(shared_address(row))
                 : "memory");
  }
}

// sums += a * b for one 16 x 8 x 16 tile of a warp.
template <class T>
__device__ inline void multiply_tile(float (&sums)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

// Copies `bytes`, 0 to 16, to 16 bytes of shared memory, asynchronously, and fills the rest with zeros.
__device__ inline void copy_async(void* to, const void* from, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)), "l"(from), "r"(bytes)
               : "memory");
}
__device__ inline void commit_copies() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int kPending>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
#endif

}  // namespace maxmoe::cuda
