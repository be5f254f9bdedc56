// 4-bit codes with scales and zero points of any type, for few rows of A: every weight is scaled. Only for the .cpp
// files that are compiled per instruction set.
//
// A register holds 16 floats: both elements of the pairs of 8 columns, neighbours. Two of them, rounded with
// vcvtne2ps2bf16, are the pairs of 16 columns in order.
#pragma once

#include "code_lines.h"
#include "integer_factors.h"

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

// Integers with scales of 16 bits.
class ScaledIntegers : public IntegerFactors {
 public:
  static constexpr int kBits = 4;
  static constexpr bool kIsCommon = false;
  static constexpr bool kScalesSums = false;

  using IntegerFactors::IntegerFactors;

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
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
