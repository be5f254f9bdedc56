// The range of the exponents of some numbers, with AVX-512.
#pragma once

#include "kernels/matrix/matrix_view.h"
#include "kernels/quantized/row_words.simd.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

MAXMOE_INLINE int64_t at_least(int64_t value, int64_t limit) {
  return value < limit ? limit : value;
}

// The smallest and the largest exponent of some numbers, biased as in memory. Zeros have none. Without numbers min is
// larger than max.
struct Exponents {
  int64_t min = 255;
  int64_t max = 0;

  MAXMOE_INLINE void add(int64_t smallest, int64_t largest) {
    min = at_most(min, smallest);
    max = at_least(max, largest);
  }
};

// The smallest and the largest unsigned number of 16 bits.
MAXMOE_INLINE int64_t smallest_half(__m512i halves) {
  const __m512i low = _mm512_and_si512(halves, _mm512_set1_epi32(0xffff));
  return _mm512_reduce_min_epu32(_mm512_min_epu32(low, _mm512_srli_epi32(halves, 16)));
}
MAXMOE_INLINE int64_t largest_half(__m512i halves) {
  const __m512i low = _mm512_and_si512(halves, _mm512_set1_epi32(0xffff));
  return _mm512_reduce_max_epu32(_mm512_max_epu32(low, _mm512_srli_epi32(halves, 16)));
}

// The exponents of the elements of pairs. Subnormal ones count as zeros, as for vdpbf16ps.
MAXMOE_INLINE Exponents exponents_of_pairs(const BFloat16Pair* pairs, int64_t count) {
  __m512i min = _mm512_set1_epi16(255 << 7);
  __m512i max = _mm512_setzero_si512();
  for (int64_t i = 0; i < count; i += 16) {
    const auto mask = static_cast<__mmask16>(count - i >= 16 ? 0xffff : (1U << (count - i)) - 1U);
    const __m512i bits = _mm512_and_si512(_mm512_maskz_loadu_epi32(mask, pairs + i), _mm512_set1_epi16(0x7f80));
    max = _mm512_max_epu16(max, bits);
    min = _mm512_mask_min_epu16(min, _mm512_test_epi16_mask(bits, bits), min, bits);
  }
  return {smallest_half(min) >> 7, largest_half(max) >> 7};
}

// The exponents of `count` floats, a multiple of the lanes of a vector.
MAXMOE_INLINE Exponents exponents_of_floats(const float* numbers, int64_t count) {
  Exponents result;
  for (int64_t i = 0; i < count; i += 16) {
    const __m512i bits = _mm512_and_si512(_mm512_loadu_si512(numbers + i), _mm512_set1_epi32(0x7fffffff));
    const __mmask16 is_number = _mm512_test_epi32_mask(bits, bits);
    if (is_number == 0) continue;
    result.add(_mm512_mask_reduce_min_epu32(is_number, bits) >> 23, _mm512_reduce_max_epu32(bits) >> 23);
  }
  return result;
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
