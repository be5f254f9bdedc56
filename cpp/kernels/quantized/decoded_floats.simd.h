// Codes of a row to floats, which are scaled and rounded, with AVX2.
#pragma once

#include <cmath>

#include "kernels/isa/vector.simd.h"
#include "kernels/quantized/quantized_matrix.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Codes of a row that have one scale and zero point.
struct Run {
  const uint8_t* codes;
  int64_t count;
  float scale;
  float zero;
};

#if defined(__AVX2__)

// Number of codes that are decoded at a time.
constexpr int64_t kCodesAtATime = 32;

// 32 floats.
struct Floats32 {
  __m256 of[4];
};

// The codes of 16 bytes, one per byte: the codes of bytes 0 to 7 in the lower half, of bytes 8 to 15 in the upper half.
template <bool kIsHighFirst>
MAXMOE_INLINE __m256i bytes_of_codes(__m128i bytes) {
  const __m256i words = _mm256_cvtepu8_epi16(bytes);
  const __m256i codes = kIsHighFirst ? _mm256_or_si256(_mm256_srli_epi16(words, 4), _mm256_slli_epi16(words, 8))
                                     : _mm256_or_si256(words, _mm256_slli_epi16(words, 4));
  return _mm256_and_si256(codes, _mm256_set1_epi8(0xf));
}

// The floats of 4-bit codes: their four bytes are looked up.
template <bool kIsHighFirst>
class FloatTable {
 public:
  explicit FloatTable(const CodeTable& table) {
    for (int byte = 0; byte < 4; ++byte) {
      alignas(16) uint8_t bytes[16];
      for (size_t i = 0; i < 16; ++i) {
        bytes[i] = static_cast<uint8_t>(std::bit_cast<uint32_t>(table.values[i]) >> 8 * byte);
      }
      const auto* source = reinterpret_cast<const __m128i*>(static_cast<const uint8_t*>(bytes));
      tables_[byte] = _mm256_broadcastsi128_si256(_mm_load_si128(source));
    }
  }

  MAXMOE_INLINE Floats32 floats(const uint8_t* source) const {
    // Codes 0 to 3 of each 8 are in the lower half, the others in the upper one: unpacking takes 4 codes of each.
    const __m128i order = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
    const __m256i codes = bytes_of_codes<kIsHighFirst>(_mm_shuffle_epi8(bytes, order));
    const auto byte = [&](int i) MAXMOE_INLINE_LAMBDA { return _mm256_shuffle_epi8(tables_[i], codes); };
    const __m256i low[2] = {_mm256_unpacklo_epi8(byte(0), byte(1)), _mm256_unpackhi_epi8(byte(0), byte(1))};
    const __m256i high[2] = {_mm256_unpacklo_epi8(byte(2), byte(3)), _mm256_unpackhi_epi8(byte(2), byte(3))};
    return {{_mm256_castsi256_ps(_mm256_unpacklo_epi16(low[0], high[0])),
             _mm256_castsi256_ps(_mm256_unpackhi_epi16(low[0], high[0])),
             _mm256_castsi256_ps(_mm256_unpacklo_epi16(low[1], high[1])),
             _mm256_castsi256_ps(_mm256_unpackhi_epi16(low[1], high[1]))}};
  }

 private:
  __m256i tables_[4];
};

// 16 floats as bfloat16, rounded to nearest, ties to even. The NaN of E4M3 stays a NaN; other NaNs may not.
MAXMOE_INLINE __m256i to_bfloat16(__m256 first, __m256 second) {
  const auto rounded = [](__m256 x) MAXMOE_INLINE_LAMBDA {
    const __m256i bits = _mm256_castps_si256(x);
    const __m256i last = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    const __m256i sum = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), last);
    return _mm256_srli_epi32(sum, 16);
  };
  return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(first), rounded(second)), 0xd8);
}

// Stores 8 floats as numbers of another type than bfloat16.
template <class T>
MAXMOE_INLINE void store_8_floats(__m256 floats, T* out) {
  if constexpr (std::is_same_v<T, double>) {
    _mm256_storeu_pd(out, _mm256_cvtps_pd(_mm256_castps256_ps128(floats)));
    _mm256_storeu_pd(out + 4, _mm256_cvtps_pd(_mm256_extractf128_ps(floats, 1)));
  } else if constexpr (std::is_same_v<T, Float16>) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out), _mm256_cvtps_ph(floats, _MM_FROUND_TO_NEAREST_INT));
  } else {
    _mm256_storeu_ps(out, floats);
  }
}

// Stores 16 floats as numbers of T.
template <class T>
MAXMOE_INLINE void store_16_floats(__m256 first, __m256 second, T* out) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), to_bfloat16(first, second));
  } else {
    store_8_floats(first, out);
    store_8_floats(second, out + 8);
  }
}

template <class T>
MAXMOE_INLINE void store_floats(const Floats32& floats, T* out) {
  store_16_floats(floats.of[0], floats.of[1], out);
  store_16_floats(floats.of[2], floats.of[3], out + 16);
}

// Decodes the codes of a run that fill whole vectors, with floats_of(codes, i) for codes i to i + 31. Returns their
// number.
template <class T, class FloatsOf>
MAXMOE_INLINE int64_t decode_floats(const Run& run, T* out, const FloatsOf& floats_of) {
  if (!std::isfinite(run.scale)) return 0;
  const __m256 scale = _mm256_set1_ps(run.scale);
  const __m256 zero = _mm256_set1_ps(run.zero);
  int64_t i = 0;
  for (; i + kCodesAtATime <= run.count; i += kCodesAtATime) {
    Floats32 floats = floats_of(run.codes, i);
#pragma GCC unroll 4
    for (__m256& x : floats.of) {
      if (run.zero != 0.0F) x = _mm256_sub_ps(x, zero);
      x = _mm256_mul_ps(x, scale);
    }
    store_floats(floats, out + i);
  }
  return i;
}

#endif

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
