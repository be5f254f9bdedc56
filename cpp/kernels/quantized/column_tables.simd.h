// 4-bit codes along the inner dimension, with scales and zero points of any type: a table of the 16 values of each
// column.
//
// A weight takes no arithmetic then, only lookups. The tables are computed once per block of columns.
#pragma once

#include "kernels/quantized/byte_tables.simd.h"
#include "kernels/quantized/lines.simd.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

class ColumnTables {
 public:
  static constexpr int kBits = 4;
  static constexpr bool kIsCommon = false;
  static constexpr int kMinRowsAhead = 4;
  static constexpr bool kTakesFourVectors = false;

  static bool fits(const CodeColumns& c) { return have_ordinary_scales(c); }

  explicit ColumnTables(const CodeColumns& c) : scales_(c), zeros_(c, c.m.zeros, 1), has_zeros_(c.m.zeros != nullptr) {
    const auto& values = c.m.values().values;
    for (size_t i = 0; i < 16; ++i) {
      for (size_t column = 0; column < 8; ++column) values_[i / 2][i % 2 * 8 + column] = values[i];
    }
    // Bits 3 to 6 of an index are the code, bits 0 to 2 the column.
    const int64_t even = c.m.codes->is_high_first ? 1 : -3;
    const int64_t odd = c.m.codes->is_high_first ? -3 : 1;
    for (int64_t i = 0; i < 2; ++i) {
      const int64_t bit = 32 * i;
      controls_[i] = multishift_control(bit + even, bit + odd, bit + 8 + even, bit + 8 + odd, bit + 16 + even,
                                        bit + 16 + odd, bit + 24 + even, bit + 24 + odd);
    }
  }

  // Reads the scales of block `index` of the range.
  MAXMOE_INLINE void begin_block(int64_t index) {
    const __m512 scale = scales_.floats(index);
    const __m512 zero = has_zeros_ ? _mm512_cvtepi32_ps(_mm512_and_si512(zeros_.bits(index), _mm512_set1_epi32(0xff)))
                                   : _mm512_setzero_ps();
    tables_[0] = table(_mm512_shuffle_f32x4(scale, scale, 0x44), _mm512_shuffle_f32x4(zero, zero, 0x44));
    tables_[1] = table(_mm512_shuffle_f32x4(scale, scale, 0xee), _mm512_shuffle_f32x4(zero, zero, 0xee));
  }

  // The pairs of a word.
  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    // The bytes of a step become neighbours: the bytes of two steps are 64 bits.
    const __m512i bytes = _mm512_shuffle_epi8(words, _mm512_set4_epi32(0x0f0b0703, 0x0e0a0602, 0x0d090501, 0x0c080400));
    const ValueBytes even = look_up(_mm512_multishift_epi64_epi8(controls_[0], bytes));
    const ValueBytes odd = look_up(_mm512_multishift_epi64_epi8(controls_[1], bytes));
    return {{_mm512_unpacklo_epi8(even.low, even.high), _mm512_unpacklo_epi8(odd.low, odd.high),
             _mm512_unpackhi_epi8(even.low, even.high), _mm512_unpackhi_epi8(odd.low, odd.high)}};
  }

 private:
  // The values of 8 columns, whose scales and zero points are there twice: value 8 q + i is code q of column i.
  MAXMOE_INLINE ValueTable table(__m512 scale, __m512 zero) const {
    const auto scaled = [&](int i) MAXMOE_INLINE_LAMBDA {
      const __m512 value = _mm512_load_ps(values_[i]);
      return _mm512_mul_ps(has_zeros_ ? _mm512_sub_ps(value, zero) : value, scale);
    };
    __m512i rounded[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
      rounded[i] = std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(scaled(2 * i + 1), scaled(2 * i)));
    }
    return ValueTable::of(rounded);
  }

  // Lookups of two steps: lanes 0 to 7 in the first table, the others in the second one.
  MAXMOE_INLINE ValueBytes look_up(__m512i codes) const {
    // (codes & 0x78) | column
    const __m512i columns = _mm512_set4_epi32(0x07070606, 0x05050404, 0x07070606, 0x05050404);
    const __m512i first = _mm512_set4_epi32(0x03030202, 0x01010000, 0x03030202, 0x01010000);
    const __m512i index =
        _mm512_ternarylogic_epi32(codes, _mm512_set1_epi8(0x78), _mm512_mask_blend_epi32(0xf0f0, first, columns), 0xea);
    constexpr __mmask64 kFirst = 0xffffffff;
    const auto in_both = [&](const __m512i(&one)[2], const __m512i(&other)[2]) MAXMOE_INLINE_LAMBDA {
      const __m512i of_first = _mm512_mask2_permutex2var_epi8(one[0], index, kFirst, one[1]);
      return _mm512_mask2_permutex2var_epi8(other[0], of_first, ~kFirst, other[1]);
    };
    return {in_both(tables_[0].low, tables_[1].low), in_both(tables_[0].high, tables_[1].high)};
  }

  ColumnScales scales_;
  ScaleReader zeros_;
  alignas(64) float values_[8][16];
  __m512i controls_[2];
  ValueTable tables_[2];
  bool has_zeros_;
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
