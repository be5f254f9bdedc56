// Codes that run across the inner dimension to pairs of bfloat16: a step is 32 columns of rows d and d + 1. The
// decoders use as few instructions as possible in the units of multiply-adds.
#pragma once

#include "kernels/quantized/byte_tables.simd.h"
#include "kernels/quantized/quantized_matrix.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The pairs of a step, in the order of VectorX2.
struct PairsX2 {
  __m512i first;   // even columns
  __m512i second;  // odd columns
};

// The codes of 32 columns of two rows, one after the other.
template <int kBits>
MAXMOE_INLINE __m512i load_two_rows(const uint8_t* first, const uint8_t* second) {
  if constexpr (kBits == 4) {
    const __m128i upper = _mm_loadu_si128(reinterpret_cast<const __m128i*>(first));
    const __m128i lower = _mm_loadu_si128(reinterpret_cast<const __m128i*>(second));
    return _mm512_castsi256_si512(_mm256_inserti128_si256(_mm256_castsi128_si256(upper), lower, 1));
  } else {
    const __m256i upper = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(first));
    const __m256i lower = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(second));
    return _mm512_inserti64x4(_mm512_castsi256_si512(upper), lower, 1);
  }
}

// Bytes of two rows of 4-bit codes as words: byte i of the first row is word 2 i, byte i of the second row word 2 i
// + 1.
MAXMOE_INLINE __m512i interleaved_rows(__m512i rows) {
  static constexpr ByteOrder kOrder = byte_order([](size_t i) { return i / 2 % 2 * 16 + i / 4; });
  return _mm512_permutexvar_epi8(load_order(kOrder), rows);
}

// A number for each of the rows of a step, as the halves of a lane of 64 bits.
MAXMOE_INLINE __m512 alternating(float first, float second) {
  const uint64_t low = std::bit_cast<uint32_t>(first);
  const uint64_t high = std::bit_cast<uint32_t>(second);
  return _mm512_castsi512_ps(_mm512_set1_epi64(static_cast<int64_t>(high << 32 | low)));
}

// Base of the decoders: the rows of a step and their scales.
class RowPairs {
 public:
  RowPairs(const QuantizedMatrix& m, Range depth, int64_t column)
      : m_(m), codes_(m.code(depth.begin, column)), column_(column), d_(depth.begin), end_(depth.end) {}

 protected:
  // Proceeds to the next step. A second row past the end is the first one, and has the scale 0.
  struct Rows {
    const uint8_t* first;
    const uint8_t* second;
    int64_t first_scale;
    int64_t second_scale;
    bool has_second;
  };
  MAXMOE_INLINE Rows next() {
    const bool has_second = d_ + 1 < end_;
    const uint8_t* const codes = codes_;
    const int64_t d = d_;
    codes_ += 2 * m_.row_bytes;
    d_ += 2;
    return {codes, has_second ? codes + m_.row_bytes : codes, m_.scale_index(d, column_),
            m_.scale_index(has_second ? d + 1 : d, column_), has_second};
  }
  template <ScaleType kType>
  MAXMOE_INLINE float scale(int64_t index) const {
    return read_scale(kType, m_.scales, index);
  }

  const QuantizedMatrix m_;

 private:
  const uint8_t* codes_;
  int64_t column_;
  int64_t d_;
  int64_t end_;
};

// 4-bit codes: for each row, the 16 values times its scale are one half of a table.
template <ScaleType kType, bool kIsHighFirst>
class TableRowPairs : public RowPairs {
 public:
  static bool fits(const QuantizedMatrix& m) { return m.scale_type == kType; }

  TableRowPairs(const QuantizedMatrix& m, Range depth, int64_t column)
      : RowPairs(m, depth, column), table_(_mm512_load_ps(m.values().values.data())) {}

  MAXMOE_INLINE PairsX2 decode() {
    const Rows rows = next();
    const __m512 of_first = scaled(rows.first_scale, true);
    const __m512 of_second = scaled(rows.second_scale, rows.has_second);
    const auto table = std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(of_second, of_first));
    const __m512i words = interleaved_rows(load_two_rows<4>(rows.first, rows.second));
    const auto look_up = [&](__m512i codes) MAXMOE_INLINE_LAMBDA {
      // The codes of the second row are looked up in the upper half: (codes & 0x000f000f) | 0x00100000.
      const __m512i index =
          _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(0x000f000f), _mm512_set1_epi32(0x00100000), 0xea);
      return _mm512_permutexvar_epi16(index, table);
    };
    const __m512i low = look_up(words);
    const __m512i high = look_up(_mm512_srli_epi16(words, 4));
    return kIsHighFirst ? PairsX2{high, low} : PairsX2{low, high};
  }

 private:
  MAXMOE_INLINE __m512 scaled(int64_t index, bool exists) const {
    const __m512 values = m_.zeros == nullptr ? table_ : _mm512_sub_ps(table_, _mm512_set1_ps(m_.zero(index)));
    return _mm512_mul_ps(values, _mm512_set1_ps(exists ? scale<kType>(index) : 0.0F));
  }

  __m512 table_;
};

// 8-bit codes with any scales. An object of class Floats has 64 codes, of which 16 at a time become floats: their
// values times Floats::kUnit.
template <class Floats, ScaleType kType>
class ByteRowPairs : public RowPairs {
 public:
  static bool fits(const QuantizedMatrix& m) { return m.scale_type == kType; }

  using RowPairs::RowPairs;

  MAXMOE_INLINE PairsX2 decode() {
    const Rows rows = next();
    const Floats floats(table_, load_two_rows<8>(rows.first, rows.second));
    constexpr float kScaleUnit = 1.0F / Floats::kUnit;
    const __m512 scales = alternating(scale<kType>(rows.first_scale) * kScaleUnit,
                                      rows.has_second ? scale<kType>(rows.second_scale) * kScaleUnit : 0.0F);
    return {pairs<0>(floats, scales), pairs<1>(floats, scales)};
  }

 private:
  // Lanes alternate between the rows; the columns are every second one from `first` on, in two halves.
  template <size_t first, size_t half>
  struct Place {
    constexpr size_t operator()(size_t lane) const { return lane % 2 * 32 + (8 * half + lane / 2) * 2 + first; }
  };
  template <size_t first>
  static MAXMOE_INLINE __m512i pairs(const Floats& floats, __m512 scales) {
    return rounded_products(floats.template lanes<Place<first, 0>>(), scales, floats.template lanes<Place<first, 1>>(),
                            scales);
  }

  Floats::Table table_ = Floats::table();
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
