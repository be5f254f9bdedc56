// What the kernels do with one row of a matrix. Only for the .cpp files that are compiled per instruction set.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#ifdef __F16C__
#include <immintrin.h>
#endif

#include "dtype.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Columns that are worked on at a time: their accumulators stay in the first-level cache.
constexpr int64_t kColumnBlock = 256;

// Empty tensors have no memory: memcpy and memset must not see their null pointers.
template <class T>
MAXMOE_INLINE void copy_row(const T* source, T* target, int64_t count) {
  if (count > 0) std::memcpy(target, source, static_cast<size_t>(count) * sizeof(T));
}

template <class T>
MAXMOE_INLINE void zero_row(T* target, int64_t count) {
  if (count > 0) std::memset(static_cast<void*>(target), 0, static_cast<size_t>(count) * sizeof(T));
}

// target = widen(source)
template <class T>
MAXMOE_INLINE void widen_row(const T* __restrict source, Accumulator<T>* __restrict target, int64_t count) {
  int64_t i = 0;
#ifdef __F16C__
  if constexpr (std::is_same_v<T, Float16>) {
    for (; i + 8 <= count; i += 8) {
      _mm256_storeu_ps(target + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i))));
    }
  }
#endif
  for (; i < count; ++i) target[i] = widen(source[i]);
}

// target = narrow(source)
template <class T>
MAXMOE_INLINE void narrow_row(const Accumulator<T>* __restrict source, T* __restrict target, int64_t count) {
  int64_t i = 0;
#ifdef __F16C__
  if constexpr (std::is_same_v<T, Float16>) {
    for (; i + 8 <= count; i += 8) {
      const __m128i half = _mm256_cvtps_ph(_mm256_loadu_ps(source + i), _MM_FROUND_TO_NEAREST_INT);
      _mm_storeu_si128(reinterpret_cast<__m128i*>(target + i), half);
    }
  }
#endif
  for (; i < count; ++i) target[i] = narrow<T>(source[i]);
}

// At most kColumnBlock elements of a row in the accumulator's type: the row itself or its copy in `buffer`.
template <class T>
MAXMOE_INLINE const Accumulator<T>* widened(const T* source, Accumulator<T>* buffer, int64_t count) {
  if constexpr (std::is_same_v<T, Accumulator<T>>) {
    return source;
  } else {
    widen_row(source, buffer, count);
    return buffer;
  }
}

// target = weight * source
template <class T>
MAXMOE_INLINE void scale_row(const T* source, Accumulator<T> weight, T* target, int64_t count) {
  Accumulator<T> buffer[kColumnBlock];
  Accumulator<T> product[kColumnBlock];
  for (int64_t begin = 0; begin < count; begin += kColumnBlock) {
    const int64_t size = count - begin < kColumnBlock ? count - begin : kColumnBlock;
    const Accumulator<T>* wide = widened(source + begin, buffer, size);
    for (int64_t i = 0; i < size; ++i) product[i] = weight * wide[i];
    narrow_row<T>(product, target + begin, size);
  }
}

// <a, b>, summed in a fixed order in sixteen lanes
template <class T>
MAXMOE_INLINE Accumulator<T> dot_rows(const T* a, const T* b, int64_t count) {
  constexpr int64_t kLanes = 16;
  Accumulator<T> lanes[kLanes] = {};
  Accumulator<T> a_buffer[kColumnBlock];
  Accumulator<T> b_buffer[kColumnBlock];
  for (int64_t begin = 0; begin < count; begin += kColumnBlock) {
    const int64_t size = count - begin < kColumnBlock ? count - begin : kColumnBlock;
    const Accumulator<T>* wide_a = widened(a + begin, a_buffer, size);
    const Accumulator<T>* wide_b = widened(b + begin, b_buffer, size);
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
      for (int64_t lane = 0; lane < kLanes; ++lane) lanes[lane] += wide_a[i + lane] * wide_b[i + lane];
    }
    for (; i < size; ++i) lanes[i % kLanes] += wide_a[i] * wide_b[i];
  }
  for (int64_t width = kLanes / 2; width > 0; width /= 2) {
    for (int64_t lane = 0; lane < width; ++lane) lanes[lane] += lanes[lane + width];
  }
  return lanes[0];
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
