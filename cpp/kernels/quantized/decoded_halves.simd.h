// Codes of a row to 16-bit numbers, with AVX2: the 16 numbers of codes that have one scale are rounded once and looked
// up.
#pragma once

#include "kernels/quantized/decoded_floats.simd.h"

#if defined(__AVX2__)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// 16 numbers of 16 bits, which are looked up by bytes.
class HalfTable {
 public:
  MAXMOE_INLINE explicit HalfTable(__m256i halves) {
    const __m256i low = _mm256_and_si256(halves, _mm256_set1_epi16(0xff));
    const __m256i bytes = _mm256_permute4x64_epi64(_mm256_packus_epi16(low, _mm256_srli_epi16(halves, 8)), 0xd8);
    low_ = _mm256_permute2x128_si256(bytes, bytes, 0x00);
    high_ = _mm256_permute2x128_si256(bytes, bytes, 0x11);
  }

  struct Halves32 {
    __m256i first;
    __m256i second;
  };
  // Looks up the lower 8 bytes of both halves of `index` (first), and the upper 8 bytes (second).
  MAXMOE_INLINE Halves32 look_up(__m256i index) const {
    const __m256i low = _mm256_shuffle_epi8(low_, index);
    const __m256i high = _mm256_shuffle_epi8(high_, index);
    return {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
  }

 private:
  __m256i low_;
  __m256i high_;
};

MAXMOE_INLINE void store_halves(HalfTable::Halves32 halves, void* out) {
  _mm256_storeu_si256(static_cast<__m256i*>(out), halves.first);
  _mm256_storeu_si256(static_cast<__m256i*>(out) + 1, halves.second);
}

// 16 values, from which the table of a run is computed.
template <class T>
class RunTable {
 public:
  explicit RunTable(const float* values) {
    constexpr bool kIsSplit = std::is_same_v<T, BFloat16> && kLanes<float> == 8;
    alignas(64) float ordered[16];
    for (int i = 0; i < 16; ++i) ordered[i] = values[kIsSplit ? i % 8 * 2 + i / 8 : i];
    std::memcpy(values_, ordered, sizeof(ordered));
  }

  // (value - zero) * scale, rounded.
  MAXMOE_INLINE __m256i halves(float scale, float zero) const {
    const auto scaled = [&](int i) MAXMOE_INLINE_LAMBDA { return (values_[i] - zero) * scale; };
#if defined(__AVX512F__)
    constexpr bool kIsFloat16 = std::is_same_v<T, Float16>;
    return kIsFloat16 ? _mm512_cvtps_ph(scaled(0), _MM_FROUND_TO_NEAREST_INT)
                      : _mm512_cvtepi32_epi16(std::bit_cast<__m512i>(round_to_bfloat16(scaled(0)) >> 16));
#else
    if constexpr (std::is_same_v<T, Float16>) {
      return _mm256_set_m128i(_mm256_cvtps_ph(scaled(1), _MM_FROUND_TO_NEAREST_INT),
                              _mm256_cvtps_ph(scaled(0), _MM_FROUND_TO_NEAREST_INT));
    } else {
      return std::bit_cast<__m256i>(round_to_bfloat16(VectorX2<float>{scaled(0), scaled(1)}));
    }
#endif
  }

 private:
  Vector<float> values_[16 / kLanes<float>];
};

// The codes of 16 bytes as bytes. Unpacking the lower 8 bytes of both halves gives the first 16 codes.
template <bool kIsHighFirst>
MAXMOE_INLINE __m256i bytes_for_unpacking(const uint8_t* source) {
  const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source));
  return bytes_of_codes<kIsHighFirst>(_mm_shuffle_epi32(bytes, 0xd8));  // bytes 4 to 7 and 8 to 11 change places
}

// Decodes 4-bit codes of a run to 16-bit numbers.
template <bool kIsHighFirst, class T>
MAXMOE_INLINE int64_t decode_halves(const Run& run, const HalfTable& table, T* out) {
  int64_t i = 0;
  for (; i + kCodesAtATime <= run.count; i += kCodesAtATime) {
    store_halves(table.look_up(bytes_for_unpacking<kIsHighFirst>(run.codes + i / 2)), out + i);
  }
  return i;
}

// E2M1 with scales that are powers of two, to bfloat16: the values are looked up, and their exponents are raised. A
// table for each run instead took 1.5 times the time of a skinny product of 1 row, 1.35 of 4 rows, and made no
// difference from 16 rows on (AVX2, across the inner dimension, AMD Zen 5 class).
class E2M1Halves {
 public:
  E2M1Halves() : table_(RunTable<BFloat16>(kE2M1.values.data()).halves(1.0F, 0.0F)) {}

  MAXMOE_INLINE int64_t decode(const Run& run, BFloat16* out) const {
    if (!(run.scale >= kSmallestScale && run.scale <= kLargestScale)) return 0;
    const uint32_t exponent = (std::bit_cast<uint32_t>(run.scale) >> 23) - 127;
    const __m256i raised_by = _mm256_set1_epi16(static_cast<int16_t>(exponent << 7));
    const auto raised = [&](__m256i numbers) MAXMOE_INLINE_LAMBDA {
      const __m256i is_zero = _mm256_cmpeq_epi16(_mm256_slli_epi16(numbers, 1), _mm256_setzero_si256());
      return _mm256_add_epi16(numbers, _mm256_andnot_si256(is_zero, raised_by));
    };
    int64_t i = 0;
    for (; i + kCodesAtATime <= run.count; i += kCodesAtATime) {
      const auto numbers = table_.look_up(bytes_for_unpacking<false>(run.codes + i / 2));
      store_halves({raised(numbers.first), raised(numbers.second)}, out + i);
    }
    return i;
  }

 private:
  HalfTable table_;
};

// E4M3 to bfloat16. A code is m / 8 + 1 times a power of two; the numbers of m are rounded alike for each power, unless
// one is subnormal or infinite. Entry i of the table is the number of code i; codes 0 to 7 are subnormal. A code above
// 15 takes an entry from 8 to 15, whose exponent is raised by the exponent of the code less 1.
class E4M3Halves {
 public:
  E4M3Halves() : table_(kE4M3.values) {}

  MAXMOE_INLINE int64_t decode(const Run& run, BFloat16* out) const {
    const float magnitude = __builtin_fabsf(run.scale);
    if (!(magnitude >= kSmallestScale && magnitude <= kLargestScale)) return 0;
    const HalfTable table(table_.halves(run.scale, 0.0F));
    const auto bytes = [](int value) { return _mm256_set1_epi8(static_cast<int8_t>(value)); };
    int64_t i = 0;
    for (; i + kCodesAtATime <= run.count; i += kCodesAtATime) {
      const __m256i source = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(run.codes + i));
      const __m256i codes = _mm256_permute4x64_epi64(source, 0xd8);  // unpacking takes 8 codes of each half
      const __m256i magnitudes = _mm256_and_si256(codes, bytes(0x7f));
      if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(magnitudes, bytes(0x7f))) != 0) break;  // a NaN
      // A code above 15 has the index, 8 to 15, with the same lower 3 bits.
      const __m256i index = _mm256_min_epu8(magnitudes, _mm256_or_si256(_mm256_and_si256(codes, bytes(7)), bytes(8)));
      const __m256i raised = _mm256_sub_epi8(magnitudes, index);  // 8 times the number that is added to the exponent
      const __m256i signs = _mm256_and_si256(codes, bytes(0x80));
      // The sum is to wrap around: adding 0x8000 changes the sign.
      const auto sum = [&](__m256i numbers, __m256i raised_by, __m256i sign) MAXMOE_INLINE_LAMBDA {
        return _mm256_add_epi16(numbers, _mm256_or_si256(_mm256_slli_epi16(raised_by, 4), sign));
      };
      const auto numbers = table.look_up(index);
      const __m256i zero = _mm256_setzero_si256();
      store_halves({sum(numbers.first, _mm256_unpacklo_epi8(raised, zero), _mm256_unpacklo_epi8(zero, signs)),
                    sum(numbers.second, _mm256_unpackhi_epi8(raised, zero), _mm256_unpackhi_epi8(zero, signs))},
                   out + i);
    }
    return i;
  }

 private:
  RunTable<BFloat16> table_;
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
