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
  explicit RunTable(const CodeTable& table) : RunTable(table.values.data()) {}
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

// Codes of 4 bits, with any scales and zero points.
template <class Format, class T>
class TableRuns {
 public:
  explicit TableRuns(const QuantizedMatrix& m) : table_(m.values()) {}

  // Decodes the codes of a run that fill whole vectors. Returns their number.
  MAXMOE_INLINE int64_t decode(const Run& run, T* out) const {
    if constexpr (kIsHalf) {
      return decode_halves<kIsHighFirst>(run, HalfTable(table_.halves(run.scale, run.zero)), out);
    } else {
      return decode_floats(
          run, out, [&](const uint8_t* codes, int64_t i) MAXMOE_INLINE_LAMBDA { return table_.floats(codes + i / 2); });
    }
  }

 private:
  static constexpr bool kIsHighFirst = Format::kCodes.is_high_first;
  static constexpr bool kIsHalf = sizeof(T) == 2;

  std::conditional_t<kIsHalf, RunTable<T>, FloatTable<kIsHighFirst>> table_;
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
