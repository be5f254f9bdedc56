// 8-bit codes along the inner dimension: every weight is scaled.
#pragma once

#include "kernels/quantized/byte_tables.simd.h"
#include "kernels/quantized/lines.simd.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// E4M3 where all columns have the same scales, as in blocks of 128 x 128: a lookup in a table of scaled values.
class ScaledE4M3Table {
 public:
  static constexpr int kBits = 8;
  static constexpr bool kIsCommon = true;
  static constexpr int kMinRowsAhead = 6;

  static bool fits(const CodeColumns& c) {
    if (c.m.codes != Codes::e4m3) return false;
    for (const int64_t row : c.rows) {
      if (c.m.scale_index(row, 0) != c.m.scale_index(c.rows[0], 0)) return false;
    }
    return have_ordinary_scales(c);
  }

  explicit ScaledE4M3Table(const CodeColumns& c)
      : m_(c.m), first_(c.m.scale_index(c.rows[0], c.depth.begin)), table_(0.0F) {}

  MAXMOE_INLINE void begin_block(int64_t index) { table_ = E4M3Table(m_.scale(first_ + index)); }

  // The pairs of a word.
  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    // In each block of four columns: the bytes of the first step, then the bytes of the second one.
    const ValueBytes values =
        table_(_mm512_shuffle_epi8(words, _mm512_set4_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100)));
    return {{_mm512_unpacklo_epi8(values.low, values.high), _mm512_unpackhi_epi8(values.low, values.high)}};
  }

 private:
  const QuantizedMatrix& m_;
  int64_t first_;
  E4M3Table table_;
};

// The scales of 16 columns: of columns 0 to 7 twice, then of columns 8 to 15 twice. A column has two lanes, one for
// each element of a pair, and rounding both vectors with vcvtne2ps2bf16 gives 16 pairs in order.
class DoubledScales {
 public:
  // Scales are multiplied by `unit`.
  explicit DoubledScales(const CodeColumns& c, float unit = 1.0F)
      : scales_(scales_of(c)), unit_(_mm512_set1_ps(unit)), type_(c.m.scale_type) {}

  MAXMOE_INLINE void begin_block(int64_t index) {
    const __m512i scale = _mm512_castps_si512(_mm512_mul_ps(scales_from_bits(type_, scales_.bits(index)), unit_));
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    scale_[0] = _mm512_castsi512_ps(_mm512_permutexvar_epi32(low, scale));
    scale_[1] = _mm512_castsi512_ps(_mm512_permutexvar_epi32(high, scale));
  }

  // The pairs of a step, from the elements of columns 0 to 7 and of columns 8 to 15; the two of a column are
  // neighbours.
  MAXMOE_INLINE __m512i scaled_pairs(__m512 first, __m512 second) const {
    return rounded_products(first, scale_[0], second, scale_[1]);
  }

 private:
  ScaleReader scales_;
  __m512 scale_[2]{};
  __m512 unit_;
  ScaleType type_;
};

// E4M3 with any scales: the values are looked up.
class ScaledE4M3 : public DoubledScales {
 public:
  static constexpr int kBits = 8;
  static constexpr bool kIsCommon = false;
  static constexpr int kMinRowsAhead = 6;

  static bool fits(const CodeColumns& c) { return c.m.codes == Codes::e4m3 && have_ordinary_scales(c); }

  explicit ScaledE4M3(const CodeColumns& c) : DoubledScales(c) {}

  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    // vpunpck*bw makes the lower 8 bytes of each block of 16 the first step, and the others the second one. Even values
    // then belong to columns 0 to 7, odd values to columns 8 to 15.
    static constexpr ByteOrder kOrder = byte_order([](size_t i) {
      const size_t column = i / 16 * 2 + i / 4 % 2 + i % 2 * 8;
      const size_t element = i / 8 % 2 * 2 + i / 2 % 2;
      return 4 * column + element;
    });
    const ValueBytes values = table_(_mm512_permutexvar_epi8(load_order(kOrder), words));
    return {
        {scaled(_mm512_unpacklo_epi8(values.low, values.high)), scaled(_mm512_unpackhi_epi8(values.low, values.high))}};
  }

 private:
  MAXMOE_INLINE __m512i scaled(__m512i values) const {
    const __m512i odd = _mm512_and_si512(values, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    return scaled_pairs(_mm512_castsi512_ps(_mm512_slli_epi32(values, 16)), _mm512_castsi512_ps(odd));
  }

  E4M3Table table_{1.0F};
};

// Integers with any scales.
class ScaledInt8 : public DoubledScales {
 public:
  static constexpr int kBits = 8;
  static constexpr bool kIsCommon = false;
  static constexpr int kMinRowsAhead = 6;

  static bool fits(const CodeColumns& c) { return c.m.codes == Codes::int8 && have_ordinary_scales(c); }

  explicit ScaledInt8(const CodeColumns& c) : DoubledScales(c, 1.0F / Floats::kUnit) {}

  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    const Floats floats({}, words);
    return {{step<0>(floats), step<2>(floats)}};
  }

 private:
  using Floats = CodeFloats<Codes::int8>;

  // Lanes alternate between the elements `first` and first + 1 of 8 columns, the ones below 8 or the others.
  template <size_t first, size_t half>
  struct Place {
    constexpr size_t operator()(size_t lane) const { return 4 * (8 * half + lane / 2) + first + lane % 2; }
  };
  template <size_t first>
  MAXMOE_INLINE __m512i step(const Floats& floats) const {
    return scaled_pairs(floats.lanes<Place<first, 0>>(), floats.lanes<Place<first, 1>>());
  }
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
