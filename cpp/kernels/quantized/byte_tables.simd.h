// Lookups of codes as bfloat16 with AVX512-VBMI.
#pragma once

#include <array>

#include "kernels/quantized/row_words.simd.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// An index of vpermb and vpermi2b.
struct alignas(64) ByteOrder {
  std::array<uint8_t, 64> bytes;
};

// The order in which byte i is byte place(i) of the source.
template <class Place>
constexpr ByteOrder byte_order(const Place& place) {
  ByteOrder order{};
  for (size_t i = 0; i < 64; ++i) order.bytes[i] = static_cast<uint8_t>(place(i));
  return order;
}

MAXMOE_INLINE __m512i load_order(const ByteOrder& order) {
  return _mm512_load_si512(order.bytes.data());
}

// The bytes of 64 values.
struct ValueBytes {
  __m512i low;
  __m512i high;
};

// A table of 128 values, two registers with their lower bytes and two with their upper bytes.
struct ValueTable {
  __m512i low[2];
  __m512i high[2];

  // 128 values of bfloat16, in order.
  static MAXMOE_INLINE ValueTable of(const __m512i (&values)[4]) {
    static constexpr ByteOrder kIndices = byte_order([](size_t i) { return i; });
    const __m512i even = _mm512_add_epi8(load_order(kIndices), load_order(kIndices));
    const __m512i odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));
    return {
        {_mm512_permutex2var_epi8(values[0], even, values[1]), _mm512_permutex2var_epi8(values[2], even, values[3])},
        {_mm512_permutex2var_epi8(values[0], odd, values[1]), _mm512_permutex2var_epi8(values[2], odd, values[3])}};
  }
  // Lookups by the lower 7 bits.
  MAXMOE_INLINE __m512i low_of(__m512i codes) const { return _mm512_permutex2var_epi8(low[0], codes, low[1]); }
  MAXMOE_INLINE __m512i high_of(__m512i codes) const { return _mm512_permutex2var_epi8(high[0], codes, high[1]); }
};

// first * of_first, then second * of_second, rounded to bfloat16.
MAXMOE_INLINE __m512i rounded_products(__m512 first, __m512 of_first, __m512 second, __m512 of_second) {
  return std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_mul_ps(second, of_second), _mm512_mul_ps(first, of_first)));
}

// 32 products of consecutive floats and a scale, rounded to bfloat16.
MAXMOE_INLINE __m512i rounded_products(const float* values, float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  return rounded_products(_mm512_load_ps(values), factor, _mm512_load_ps(values + 16), factor);
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
