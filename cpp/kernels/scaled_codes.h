// 4-bit codes along the inner dimension, with scales and zero points of any type: every weight is scaled. Only for the
// .cpp files that are compiled per instruction set.
//
// A register holds 16 floats: both elements of the pairs of 8 columns, neighbours. Two of them, rounded with
// vcvtne2ps2bf16, are the pairs of 16 columns in order.
#pragma once

#include "code_lines.h"

#if defined(MAXMOE_DECODES_PAIRS)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Columns i and 8 + i become neighbours, the halves of a lane of 64 bits.
MAXMOE_INLINE __m512i paired_columns(__m512i words) {
  return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 8, 1, 9, 2, 10, 3, 11, 4, 12, 5, 13, 6, 14, 7, 15), words);
}

// Codes of any table. NF4, whose first codes are in the high halves of bytes, has no zero points; otherwise zeros are
// subtracted where there are none, so that there is no branch.
template <bool kIsHighFirst>
class ScaledTable {
 public:
  static constexpr int kBits = 4;
  static constexpr bool kIsCommon = false;
  static constexpr bool kScalesSums = false;

  static bool fits(const CodeColumns& c) {
    const bool has_order = bits_per_code(c.m.codes) == kBits && is_high_first(c.m.codes) == kIsHighFirst;
    return has_order && !(kIsHighFirst && c.m.zeros != nullptr) && have_ordinary_scales(c);
  }

  explicit ScaledTable(const CodeColumns& c)
      : scales_(scales_of(c)),
        zeros_(c, c.m.zeros, 1),
        table_(_mm512_load_ps(table_of(c.m.codes, c.m.zeros != nullptr).values.data())),
        type_(c.m.scale_type),
        has_zeros_(c.m.zeros != nullptr) {}

  // Reads the scales of block `index` of the range.
  MAXMOE_INLINE void begin_block(int64_t index) {
    store_doubled_lanes(scales_from_bits(type_, scales_.bits(index)), scale_);
    if (kIsHighFirst || !has_zeros_) return;
    const __m512i zeros = _mm512_and_si512(zeros_.bits(index), _mm512_set1_epi32(0xff));
    store_doubled_lanes(_mm512_cvtepi32_ps(zeros), zero_);
  }

  // The pairs of a word. Each step is decoded when it is asked for: the accumulators of many rows leave few registers.
  MAXMOE_INLINE auto decode(__m512i words) const {
    return [this, columns = paired_columns(words)](int step) MAXMOE_INLINE_LAMBDA {
      const int bit = 8 * step;
      return std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(scaled(columns, bit + 32, 1), scaled(columns, bit, 0)));
    };
  }

 private:
  // The elements of a step of half of the columns, from the byte that begins at `bit` of a lane of 64 bits.
  MAXMOE_INLINE __m512 scaled(__m512i columns, int bit, int half) const {
    const int first = kIsHighFirst ? bit + 4 : bit;
    const int second = kIsHighFirst ? bit : bit + 4;
    // The lookup reads the lower 4 bits of a lane.
    const __m512i index = _mm512_multishift_epi64_epi8(multishift_control(first, 0, 0, 0, second, 0, 0, 0), columns);
    __m512 values = _mm512_permutexvar_ps(index, table_);
    if constexpr (!kIsHighFirst) values = _mm512_sub_ps(values, zero_[half]);
    return _mm512_mul_ps(values, scale_[half]);
  }

  ScaleReader scales_;
  ScaleReader zeros_;
  __m512 table_;
  __m512 scale_[2];
  __m512 zero_[2] = {};
  ScaleType type_;
  bool has_zeros_;
};

// Integers with scales of 16 bits. No lookup is needed: a code in the upper bits of a mantissa is the float
// 1 + code / 16. Times 16 scale, less (16 + zero) scale, in one multiply-add, it is (code - zero) scale. Both products
// are exact, with 4096 in the place of 16, too: the numbers from 4096 to 4111 have 13 bits, and a scale has at most 11.
class ScaledIntegers {
 public:
  static constexpr int kBits = 4;
  static constexpr bool kIsCommon = false;
  static constexpr bool kScalesSums = false;

  static bool fits(const CodeColumns& c) {
    const bool has_short_scales = c.m.scale_type == ScaleType::bfloat16 || c.m.scale_type == ScaleType::float16;
    return c.m.codes == Codes::int4 && has_short_scales && have_ordinary_scales(c);
  }

  explicit ScaledIntegers(const CodeColumns& c)
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

  // The pairs of a word.
  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    const __m512i columns = paired_columns(words);
    WordPairs<kBits> result;
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      const __m512i first = in_place(columns, 16 * i);
      const __m512i second = in_place(columns, 16 * i + 32);
#pragma GCC unroll 2
      for (int place = 0; place < 2; ++place) {
        result.step[2 * i + place] =
            std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(scaled(second, place, 1), scaled(first, place, 0)));
      }
    }
    return result;
  }

 private:
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
