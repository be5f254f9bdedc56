// 8-bit codes for few rows of A: every weight is scaled. Only for the .cpp files that are compiled per instruction set.
#pragma once

#include "byte_tables.h"
#include "code_lines.h"

#if defined(MAXMOE_DECODES_PAIRS)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// An index of vpermb.
struct alignas(64) ByteOrder {
  std::array<uint8_t, 64> bytes;
};

// The order in which byte i is that of element(i) of column(i) in a word.
template <class Column, class Element>
constexpr ByteOrder byte_order(const Column& column, const Element& element) {
  ByteOrder order{};
  for (size_t i = 0; i < 64; ++i) order.bytes[i] = static_cast<uint8_t>(4 * column(i) + element(i));
  return order;
}

// E4M3 where all columns have the same scales, as in blocks of 128 x 128: a lookup in a table of scaled values.
class ScaledE4M3Table {
 public:
  static constexpr int kBits = 8;
  static constexpr bool kIsCommon = true;  // one object decodes all vectors of columns
  static constexpr bool kScalesSums = false;

  // `first` is the first one of all columns.
  static bool fits(const CodeColumns& c, const CodeColumns& first) {
    if (c.m.codes != Codes::e4m3) return false;
    for (const int64_t row : c.rows) {
      if (c.m.scale_index(row, 0) != c.m.scale_index(first.rows[0], 0)) return false;
    }
    return have_ordinary_scales(c);
  }

  explicit ScaledE4M3Table(const CodeColumns& c)
      : m_(c.m), first_(c.m.scale_index(c.rows[0], c.depth.begin)), table_(0.0F) {}

  MAXMOE_INLINE void begin_block(int64_t index) { table_ = E4M3Table(m_.scale(first_ + index)); }

  // The pairs of a word.
  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    // In each block of four columns: the bytes of the first step, then those of the second one.
    const ValueBytes values =
        table_(_mm512_shuffle_epi8(words, _mm512_set4_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100)));
    return {{_mm512_unpacklo_epi8(values.low, values.high), _mm512_unpackhi_epi8(values.low, values.high)}};
  }

 private:
  const QuantizedMatrix& m_;
  int64_t first_;
  E4M3Table table_;
};

// The scales of 16 columns, those of columns 0 to 7 twice, and those of the others.
class DoubledScales {
 public:
  explicit DoubledScales(const CodeColumns& c) : scales_(scales_of(c)), type_(c.m.scale_type) {}

  MAXMOE_INLINE void begin_block(int64_t index) {
    store_doubled_lanes(scales_from_bits(type_, scales_.bits(index)), scale_);
  }

  // The pairs of a step from the elements of columns 0 to 7, neighbours, and those of the others.
  MAXMOE_INLINE __m512i scaled_pairs(__m512 first, __m512 second) const {
    return std::bit_cast<__m512i>(
        _mm512_cvtne2ps_pbh(_mm512_mul_ps(second, scale_[1]), _mm512_mul_ps(first, scale_[0])));
  }

 private:
  ScaleReader scales_;
  __m512 scale_[2]{};
  ScaleType type_;
};

// E4M3 with any scales: the values are looked up.
class ScaledE4M3 : public DoubledScales {
 public:
  static constexpr int kBits = 8;
  static constexpr bool kIsCommon = false;
  static constexpr bool kScalesSums = false;

  static bool fits(const CodeColumns& c) { return c.m.codes == Codes::e4m3 && have_ordinary_scales(c); }

  explicit ScaledE4M3(const CodeColumns& c) : DoubledScales(c) {}

  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    // vpunpck*bw makes the lower 8 bytes of each block of 16 the first step, and the others the second one. Even values
    // are then those of columns 0 to 7, odd ones those of columns 8 to 15.
    static constexpr ByteOrder kOrder = byte_order([](size_t i) { return i / 16 * 2 + i / 4 % 2 + i % 2 * 8; },
                                                   [](size_t i) { return i / 8 % 2 * 2 + i / 2 % 2; });
    const ValueBytes values = table_(_mm512_permutexvar_epi8(_mm512_load_si512(kOrder.bytes.data()), words));
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

// Integers, without a lookup: a byte in the lower bits of the mantissa of 2^23 adds its value, and in the bits above
// those, with 2^15, too.
class ScaledInt8 : public DoubledScales {
 public:
  static constexpr int kBits = 8;
  static constexpr bool kIsCommon = false;
  static constexpr bool kScalesSums = false;

  static bool fits(const CodeColumns& c) { return c.m.codes == Codes::int8 && have_ordinary_scales(c); }

  explicit ScaledInt8(const CodeColumns& c) : DoubledScales(c) {}

  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    // In each lane: the elements of a column below 8 and of the column 8 above it, of the first step and of the second
    // one. The next lane has the second elements of their pairs.
    static constexpr ByteOrder kOrder =
        byte_order([](size_t i) { return i / 8 + i % 2 * 8; }, [](size_t i) { return i / 2 % 2 * 2 + i / 4 % 2; });
    const __m512i ordered = _mm512_permutexvar_epi8(_mm512_load_si512(kOrder.bytes.data()), words);
    return {{scaled(ordered), scaled(_mm512_srli_epi32(ordered, 16))}};
  }

 private:
  MAXMOE_INLINE __m512i scaled(__m512i bytes) const {
    // (bytes & mask) ^ number: the highest bit of the byte changes, which adds 128.
    const auto value = [&](int mask, int number, float offset) MAXMOE_INLINE_LAMBDA {
      const __m512i bits = _mm512_ternarylogic_epi32(bytes, _mm512_set1_epi32(mask), _mm512_set1_epi32(number), 0x6a);
      return _mm512_sub_ps(_mm512_castsi512_ps(bits), _mm512_set1_ps(offset));
    };
    return scaled_pairs(value(0xff, 0x4b000080, 0x1p23F + 128.0F), value(0xff00, 0x47008000, 0x1p15F + 128.0F));
  }
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
