// Vectors of the instruction set that the file is compiled for: load, convert, multiply-add, round, store.
//
// The compiler's vector extensions are used for arithmetic, so that one source serves all instruction sets. Intrinsics
// are used only for instructions that the extensions cannot express.
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

#include "kernels/isa/target.simd.h"
#include "kernels/matrix/dtype.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// A vector of kBytes bytes with lanes of S.
template <class S, int kBytes>
struct VectorOf {
  typedef S type __attribute__((vector_size(kBytes)));  // NOLINT(modernize-use-using): an alias loses the attribute
};

// A vector register of S, which is float, double or an unsigned integer of 32 bits.
template <class S>
using Vector = VectorOf<S, kVectorBytes>::type;

// Number of elements of S in a vector register.
template <class S>
constexpr int kLanes = kVectorBytes / static_cast<int>(sizeof(S));

// Two bfloat16 that are neighbours along the inner dimension of a product, the first one in the low half. A lane of the
// AVX512-BF16 instruction vdpbf16ps multiplies two such pairs. oneDNN and PyTorch call matrices of such pairs
// VNNI-packed, after the instructions for integers (Vector Neural Network Instructions) that had this layout first;
// files with "vnni" in their names make or multiply such pairs.
using BFloat16Pair = uint32_t;

// The type of a lane of load_vector<T>.
template <class T>
using VectorElement = std::conditional_t<std::is_same_v<T, BFloat16Pair>, BFloat16Pair, Accumulator<T>>;

// Loads kLanes elements of T and converts them to the accumulator's type; pairs are not converted. `source` need not be
// aligned: memcpy compiles to an unaligned load.
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

// sum + factor * vector in each lane. The compiler contracts it to a fused multiply-add, which rounds once, if the
// instruction set has one. It contracts the scalar loops over the columns that fill no vector as well, so that their
// bits are the same.
template <class S>
MAXMOE_INLINE Vector<S> multiply_add(Vector<S> sum, S factor, Vector<S> vector) {
  return sum + factor * vector;
}

// sum + first * first + second * second in each lane. vdpbf16ps treats subnormals as zero, the plain arithmetic does
// not.
MAXMOE_INLINE Vector<float> multiply_add(Vector<float> sum, BFloat16Pair factor, Vector<BFloat16Pair> vector) {
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

// Stores a vector to `target`, which need not be aligned.
template <class S>
MAXMOE_INLINE void store_vector(S* target, Vector<S> vector) {
  std::memcpy(target, &vector, sizeof(vector));
}

// The nearest bfloat16, ties to even, in the upper 16 bits of each lane. A NaN keeps its sign and gets the quiet bit:
// without that, cutting off the lower 16 bits could leave an infinity.
MAXMOE_INLINE Vector<uint32_t> round_to_bfloat16(Vector<float> vector) {
  const auto bits = std::bit_cast<Vector<uint32_t>>(vector);
  return vector != vector ? bits | 0x400000U : bits + 0x7fffU + ((bits >> 16) & 1U);
}

// A vector of 16-bit lanes with the number of lanes of a vector of float.
using HalfVector = VectorOf<uint16_t, kVectorBytes / 2>::type;

// The nearest float16, ties to even, of each lane.
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

// target = narrow(vector).
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

// x86-64 and most AArch64 processors have cache lines of 64 bytes, which hold a whole number of vectors.
constexpr int64_t kCacheLineBytes = 64;
static_assert(kCacheLineBytes % kVectorBytes == 0);

// Non-temporal store to `target`, which is aligned to kVectorBytes. A cache line that is written whole is not read from
// memory first (write-allocate), and evicts no other line. Non-temporal stores are weakly ordered: another thread sees
// them only after fence_nontemporal_stores().
template <class V>
MAXMOE_INLINE void store_vector_nontemporal(void* target, V vector) {
  static_assert(sizeof(V) == kVectorBytes);
#if MAXMOE_EMULATES_TILES
  std::memcpy(target, &vector, sizeof(vector));
#elif defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(target), std::bit_cast<__m512i>(vector));
#elif defined(__AVX2__)
  _mm256_stream_si256(static_cast<__m256i*>(target), std::bit_cast<__m256i>(vector));
#elif defined(__SSE2__)
  _mm_stream_si128(static_cast<__m128i*>(target), std::bit_cast<__m128i>(vector));
#else
  std::memcpy(target, &vector, sizeof(vector));
#endif
}

// Orders the non-temporal stores of this thread before its later stores.
MAXMOE_INLINE void fence_nontemporal_stores() {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

// Two vectors, 2 * kLanes elements. Vectors of bfloat16 are deinterleaved: `first` has the elements at even places,
// `second` those at odd places. Converting them is then one shift and one mask of 32-bit lanes; the order of memory
// would need a permutation across the vector. Arithmetic is the same in every lane, and store_narrowed_x2 restores the
// order.
template <class S>
struct VectorX2 {
  Vector<S> first;
  Vector<S> second;
};

// Number of elements in a VectorX2.
template <class S>
constexpr int64_t kLanesX2 = 2 * kLanes<S>;

// The column of a micro-panel of B in lane `lane` of vector `vector` of a step: see VectorX2.
template <class T>
constexpr int64_t column_of_lane(int vector, int lane) {
  if (std::is_same_v<T, BFloat16>) return 2 * lane + vector;
  return vector * kLanes<Accumulator<T>> + lane;
}

// Loads kLanesX2 elements of T and converts them to the accumulator's type. `source` need not be aligned.
template <class T>
MAXMOE_INLINE VectorX2<Accumulator<T>> load_x2(const T* source) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    Vector<uint32_t> bits;
    std::memcpy(&bits, source, sizeof(bits));
    return {std::bit_cast<Vector<float>>(bits << 16), std::bit_cast<Vector<float>>(bits & 0xffff0000U)};
  } else {
    return {load_vector(source), load_vector(source + kLanes<Accumulator<T>>)};
  }
}

// __builtin_shufflevector takes its indices as constants, hence the overloads with an index sequence.
template <class V, int... kLane>
MAXMOE_INLINE V blend_even_odd(V even, V odd, std::integer_sequence<int, kLane...> /*lanes*/) {
  return __builtin_shufflevector(even, odd, (kLane % 2 == 0 ? kLane : kLane + static_cast<int>(sizeof...(kLane)))...);
}

// The even lanes of `even` and the odd lanes of `odd`.
template <class V>
MAXMOE_INLINE V blend_even_odd(V even, V odd) {
  return blend_even_odd(even, odd, std::make_integer_sequence<int, sizeof(V) / sizeof(even[0])>());
}

template <class V, int... kLane>
MAXMOE_INLINE auto concatenated(V first, V second, std::integer_sequence<int, kLane...> /*lanes*/) {
  return __builtin_shufflevector(first, second, kLane...);
}

// A vector of twice the lanes: the lanes of `first`, then the lanes of `second`.
template <class V>
MAXMOE_INLINE auto concatenated(V first, V second) {
  return concatenated(first, second, std::make_integer_sequence<int, 2 * sizeof(V) / sizeof(first[0])>());
}

// The nearest bfloat16, ties to even, of 2 * kLanes results of arithmetic, in the order of memory. Both vectors are
// rounded at once, in lanes of 16 bits. A NaN stays a NaN: arithmetic returns quiet ones, whose quiet bit is among the
// upper 16 bits.
MAXMOE_INLINE auto round_to_bfloat16(VectorX2<float> x2) {
  using Halves = VectorOf<int16_t, kVectorBytes>::type;
  const auto first = std::bit_cast<Vector<uint32_t>>(x2.first);
  const auto second = std::bit_cast<Vector<uint32_t>>(x2.second);
  const auto kept = blend_even_odd(std::bit_cast<Halves>(first >> 16), std::bit_cast<Halves>(second));
  const auto cut_off = blend_even_odd(std::bit_cast<Halves>(first), std::bit_cast<Halves>(second << 16));
  // Rounds up if cut_off > 0x8000, or if it is equal and kept is odd. 0x8000 is subtracted from both sides, because the
  // comparison is signed.
  const Halves is_up = (cut_off ^ INT16_MIN) > -(kept & 1);
  const Halves is_last_nan = (kept | INT16_MIN) == -1;  // 0x7fff and 0xffff, which a carry would turn into zeros
  return kept - (is_up < is_last_nan);                  // true is -1: up, unless is_last_nan
}

// target = narrow(x2), in the order of memory. A non-temporal store requires a `target` that is aligned to
// kVectorBytes.
template <class T, bool kNonTemporal = false>
MAXMOE_INLINE void store_narrowed_x2(T* target, VectorX2<Accumulator<T>> x2) {
  const auto store = [](T* place, auto vector) {
    if constexpr (kNonTemporal) {
      store_vector_nontemporal(place, vector);
    } else {
      std::memcpy(place, &vector, sizeof(vector));
    }
  };
  if constexpr (std::is_same_v<T, BFloat16>) {
    store(target, round_to_bfloat16(x2));
  } else if constexpr (std::is_same_v<T, Float16>) {
    store(target, concatenated(round_to_float16(x2.first), round_to_float16(x2.second)));
  } else {
    store(target, x2.first);
    store(target + kLanes<T>, x2.second);
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
