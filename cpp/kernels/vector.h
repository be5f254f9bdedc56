// Vectors of the instruction set at hand. Only for the .cpp files that are compiled per instruction set.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "dtype.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

#if defined(__AVX512F__)
constexpr int kVectorBytes = 64;
constexpr int kVectorRegisters = 32;
#elif defined(__AVX2__)
constexpr int kVectorBytes = 32;
constexpr int kVectorRegisters = 16;
#elif defined(__aarch64__)
constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 32;
#else
constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 16;
#endif

template <class S, int kBytes>
struct VectorOf {
  typedef S type __attribute__((vector_size(kBytes)));  // NOLINT(modernize-use-using): an alias loses the attribute
};

// S is float, double or uint32_t.
template <class S>
using Vector = VectorOf<S, kVectorBytes>::type;

template <class S>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(S));

// Two bfloat16 that follow each other in a sum of products, the first one in the low half.
using Pair = uint32_t;

template <class T>
using VectorElement = std::conditional_t<std::is_same_v<T, Pair>, Pair, Accumulator<T>>;

// kLanes elements of T, widened; pairs as they are.
template <class T>
MAXMOE_INLINE Vector<VectorElement<T>> load_vector(const T* source) {
  using S = VectorElement<T>;
  if constexpr (std::is_same_v<T, S>) {
    Vector<S> vector;
    std::memcpy(&vector, source, sizeof(vector));
    return vector;
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    VectorOf<uint16_t, kVectorBytes / 2>::type bits;
    std::memcpy(&bits, source, sizeof(bits));
    return std::bit_cast<Vector<S>>(__builtin_convertvector(bits, Vector<uint32_t>) << 16);
  } else {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(source)));
#elif defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(source)));
#else
    Vector<S> vector;
    for (int i = 0; i < kLanes<S>; ++i) vector[i] = widen(source[i]);
    return vector;
#endif
  }
}

// sum + factor * vector; both products of a pair.
template <class S>
MAXMOE_INLINE Vector<S> multiply_add(Vector<S> sum, S factor, Vector<S> vector) {
  return sum + factor * vector;
}

MAXMOE_INLINE Vector<float> multiply_add(Vector<float> sum, Pair factor, Vector<Pair> vector) {
#ifdef __AVX512BF16__
  const __m512i factors = _mm512_set1_epi32(static_cast<int>(factor));
  return _mm512_dpbf16_ps(sum, std::bit_cast<__m512bh>(factors), std::bit_cast<__m512bh>(vector));
#else
  const auto low = std::bit_cast<Vector<float>>(vector << 16);
  const auto high = std::bit_cast<Vector<float>>(vector & 0xffff0000U);
  sum = sum + std::bit_cast<float>(factor << 16) * low;
  return sum + std::bit_cast<float>(factor & 0xffff0000U) * high;
#endif
}

template <class S>
MAXMOE_INLINE void store_vector(S* target, Vector<S> vector) {
  std::memcpy(target, &vector, sizeof(vector));
}

// The nearest bfloat16, ties to even, in the upper 16 bits. A NaN keeps its sign, and stays one.
MAXMOE_INLINE Vector<uint32_t> round_to_bfloat16(Vector<float> vector) {
  const auto bits = std::bit_cast<Vector<uint32_t>>(vector);
  return vector != vector ? bits | 0x400000U : bits + 0x7fffU + ((bits >> 16) & 1U);
}

// target = narrow(vector)
template <class T>
MAXMOE_INLINE void store_narrowed(T* target, Vector<Accumulator<T>> vector) {
  if constexpr (std::is_same_v<T, Accumulator<T>>) {
    store_vector(target, vector);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const auto half =
        __builtin_convertvector(round_to_bfloat16(vector) >> 16, VectorOf<uint16_t, kVectorBytes / 2>::type);
    std::memcpy(target, &half, sizeof(half));
  } else {
#if defined(__AVX512F__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(target), _mm512_cvtps_ph(vector, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128(reinterpret_cast<__m128i*>(target), _mm256_cvtps_ph(vector, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < kLanes<Accumulator<T>>; ++i) target[i] = narrow<T>(vector[i]);
#endif
  }
}

constexpr int64_t kCacheLine = 64;

// target = source, past the caches: lines that are written whole need not be read first. Others see it after
// end_streaming().
MAXMOE_INLINE void stream_line(const std::byte* source, std::byte* target) {
#if defined(__AVX512F__)
  _mm512_stream_si512(reinterpret_cast<__m512i*>(target), _mm512_loadu_si512(source));
#elif defined(__AVX2__)
  for (int64_t i = 0; i < kCacheLine; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(target + i),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(source + i)));
  }
#elif defined(__SSE2__)
  for (int64_t i = 0; i < kCacheLine; i += 16) {
    _mm_stream_si128(reinterpret_cast<__m128i*>(target + i),
                     _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + i)));
  }
#else
  std::memcpy(target, source, kCacheLine);
#endif
}

MAXMOE_INLINE void end_streaming() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// 2 * kLanes elements in the order that is cheapest to have: of bfloat16 those at even places first, which are the
// lower halves of 32 bits. What is computed for each element alone can be stored back in its place.
template <class S>
struct TwoVectors {
  Vector<S> first;
  Vector<S> second;
};

template <class T>
MAXMOE_INLINE TwoVectors<Accumulator<T>> load_two(const T* source) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    Vector<uint32_t> bits;
    std::memcpy(&bits, source, sizeof(bits));
    return {std::bit_cast<Vector<float>>(bits << 16), std::bit_cast<Vector<float>>(bits & 0xffff0000U)};
  } else {
    return {load_vector(source), load_vector(source + kLanes<Accumulator<T>>)};
  }
}

// target = narrow(two)
template <class T>
MAXMOE_INLINE void store_two_narrowed(T* target, TwoVectors<Accumulator<T>> two) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto bits = round_to_bfloat16(two.first) >> 16 | (round_to_bfloat16(two.second) & 0xffff0000U);
    std::memcpy(target, &bits, sizeof(bits));
  } else {
    store_narrowed<T>(target, two.first);
    store_narrowed<T>(target + kLanes<Accumulator<T>>, two.second);
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
