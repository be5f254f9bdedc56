// Vectors of the instruction set at hand. Only for the .cpp files that are compiled per instruction set.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

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

// 16-bit numbers, as many as there are lanes of float.
using HalfVector = VectorOf<uint16_t, kVectorBytes / 2>::type;

// The nearest float16, ties to even.
MAXMOE_INLINE HalfVector round_to_float16(Vector<float> vector) {
#if defined(__AVX512F__)
  return std::bit_cast<HalfVector>(_mm512_cvtps_ph(vector, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
  return std::bit_cast<HalfVector>(_mm256_cvtps_ph(vector, _MM_FROUND_TO_NEAREST_INT));
#else
  HalfVector half;
  for (int i = 0; i < kLanes<float>; ++i) half[i] = narrow<Float16>(vector[i]).bits;
  return half;
#endif
}

// target = narrow(vector)
template <class T>
MAXMOE_INLINE void store_narrowed(T* target, Vector<Accumulator<T>> vector) {
  if constexpr (std::is_same_v<T, Accumulator<T>>) {
    store_vector(target, vector);
  } else if constexpr (std::is_same_v<T, BFloat16>) {
    const auto half = __builtin_convertvector(round_to_bfloat16(vector) >> 16, HalfVector);
    std::memcpy(target, &half, sizeof(half));
  } else {
    const HalfVector half = round_to_float16(vector);
    std::memcpy(target, &half, sizeof(half));
  }
}

constexpr int64_t kCacheLine = 64;
static_assert(kCacheLine % kVectorBytes == 0);

// target = vector, past the caches: a line that is written whole need not be read first. `target` is aligned. Others
// see it after end_streaming().
template <class V>
MAXMOE_INLINE void stream_vector(void* target, V vector) {
  static_assert(sizeof(V) == kVectorBytes);
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(target), std::bit_cast<__m512i>(vector));
#elif defined(__AVX2__)
  _mm256_stream_si256(static_cast<__m256i*>(target), std::bit_cast<__m256i>(vector));
#elif defined(__SSE2__)
  _mm_stream_si128(static_cast<__m128i*>(target), std::bit_cast<__m128i>(vector));
#else
  std::memcpy(target, &vector, sizeof(vector));
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

template <class V, int... kLane>
MAXMOE_INLINE V even_and_odd(V even, V odd, std::integer_sequence<int, kLane...> /*lanes*/) {
  return __builtin_shufflevector(even, odd, (kLane % 2 == 0 ? kLane : kLane + static_cast<int>(sizeof...(kLane)))...);
}

// The lanes at even places of the one, and those at odd places of the other.
template <class V>
MAXMOE_INLINE V even_and_odd(V even, V odd) {
  return even_and_odd(even, odd, std::make_integer_sequence<int, sizeof(V) / sizeof(even[0])>());
}

template <class V, int... kLane>
MAXMOE_INLINE auto concatenated(V first, V second, std::integer_sequence<int, kLane...> /*lanes*/) {
  return __builtin_shufflevector(first, second, kLane...);
}

template <class V>
MAXMOE_INLINE auto concatenated(V first, V second) {
  return concatenated(first, second, std::make_integer_sequence<int, 2 * sizeof(V) / sizeof(first[0])>());
}

// Both at once, in lanes of 16 bits: the nearest bfloat16 of results of arithmetic, ties to even. NaNs stay NaN.
MAXMOE_INLINE auto round_to_bfloat16(TwoVectors<float> two) {
  using Halves = VectorOf<int16_t, kVectorBytes>::type;
  const auto first = std::bit_cast<Vector<uint32_t>>(two.first);
  const auto second = std::bit_cast<Vector<uint32_t>>(two.second);
  const auto kept = even_and_odd(std::bit_cast<Halves>(first >> 16), std::bit_cast<Halves>(second));
  const auto cut_off = even_and_odd(std::bit_cast<Halves>(first), std::bit_cast<Halves>(second << 16));
  // Up where cut_off > 0x8000, or equal to it and kept is odd: less 0x8000, as comparisons are of signed numbers.
  const Halves is_up = (cut_off ^ INT16_MIN) > -(kept & 1);
  const Halves is_last_nan = (kept | INT16_MIN) == -1;
  return kept - (is_up < is_last_nan);  // true is -1: up, unless a NaN would wrap round to zero
}

// target = narrow(two), past the caches if it says so; then `target` is aligned to vectors.
template <class T, bool kStreamed = false>
MAXMOE_INLINE void store_two_narrowed(T* target, TwoVectors<Accumulator<T>> two) {
  const auto store = [](T* place, auto vector) {
    if constexpr (kStreamed) {
      stream_vector(place, vector);
    } else {
      std::memcpy(place, &vector, sizeof(vector));
    }
  };
  if constexpr (std::is_same_v<T, BFloat16>) {
    store(target, round_to_bfloat16(two));
  } else if constexpr (std::is_same_v<T, Float16>) {
    store(target, concatenated(round_to_float16(two.first), round_to_float16(two.second)));
  } else {
    store(target, two.first);
    store(target + kLanes<T>, two.second);
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
