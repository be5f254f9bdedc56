// 4-bit integers with scales of 16 bits, as factors and offsets of 16 columns. Only for the .cpp files that are
// compiled per instruction set.
#pragma once

#include "code_columns.h"

#if defined(MAXMOE_DECODES_PAIRS)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// No lookup is needed: a code in the upper bits of a mantissa is the float 1 + code / 16. Times 16 scale, less
// (16 + zero) scale, in one multiply-add, it is (code - zero) scale. Both products are exact, with 4096 in the place of
// 16, too: the numbers from 4096 to 4111 have 13 bits, and a scale has at most 11.
class IntegerFactors {
 public:
  static bool fits(const CodeColumns& c) {
    const bool has_short_scales = c.m.scale_type == ScaleType::bfloat16 || c.m.scale_type == ScaleType::float16;
    return c.m.codes == Codes::int4 && has_short_scales && have_ordinary_scales(c);
  }

  explicit IntegerFactors(const CodeColumns& c)
      : scales_(scales_of(c)), zeros_(c, c.m.zeros, 1), type_(c.m.scale_type), has_zeros_(c.m.zeros != nullptr) {}

  // Reads the scales of block `index` of the range.
  MAXMOE_INLINE void begin_block(int64_t index) {
    const __m512 scale = scales_from_bits(type_, scales_.bits(index));
    const __m512 zero = has_zeros_ ? _mm512_cvtepi32_ps(_mm512_and_si512(zeros_.bits(index), _mm512_set1_epi32(0xff)))
                                   : _mm512_set1_ps(8.0F);
    for (int place = 0; place < 2; ++place) {
      const __m512 one = _mm512_set1_ps(kOne[place]);
      store_doubled_lanes(_mm512_mul_ps(scale, one), factor_[place]);
      store_doubled_lanes(_mm512_mul_ps(_mm512_add_ps(zero, one), scale), offset_[place]);
    }
  }

  // The bytes of two steps in place, from the one that begins at `bit` of a lane of 64 bits: of the first step the code
  // is in bits 11 to 14 of a lane, which are bits 3 to 6 of byte 1, of the second step in bits 19 to 22, the same bits
  // of byte 2.
  static MAXMOE_INLINE __m512i in_place(__m512i codes, int bit) {
    const int first = bit - 3;
    return _mm512_multishift_epi64_epi8(multishift_control(0, first, first + 8, 0, 0, first + 4, first + 12, 0), codes);
  }

  // The elements of step `place` of the two, of half of the columns.
  MAXMOE_INLINE __m512 scaled(__m512i two_steps, int place, int half) const {
    // (two_steps & mask) | 0x3f800000
    const __m512i value = _mm512_ternarylogic_epi32(two_steps, _mm512_set1_epi32(0x7800 << 8 * place),
                                                    _mm512_set1_epi32(0x3f800000), 0xea);
    return _mm512_fmsub_ps(_mm512_castsi512_ps(value), factor_[place][half], offset_[place][half]);
  }

 private:
  // The reciprocal of what one unit of a code adds to 1 in each place.
  static constexpr float kOne[2] = {4096.0F, 16.0F};

  ScaleReader scales_;
  ScaleReader zeros_;
  __m512 factor_[2][2];
  __m512 offset_[2][2];
  ScaleType type_;
  bool has_zeros_;
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
