// Codes that run across the inner dimension to pairs of bfloat16: a step is 32 columns of rows d and d + 1. The
// decoders use as few instructions as possible in the units of multiply-adds.
#pragma once

#include "kernels/quantized/e2m1.simd.h"

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

// E2M1 with scales that are powers of two, as ScaledE2M1. With TableRowPairs instead 16 rows took 1.13 times the time,
// 64 rows 1.06 (AMD Zen 5 class).
class E2M1RowPairs : public RowPairs {
 public:
  static bool fits(const QuantizedMatrix& m) { return m.codes == Codes::e2m1 && m.zeros == nullptr; }

  using RowPairs::RowPairs;

  MAXMOE_INLINE PairsX2 decode() {
    const Rows rows = next();
    const auto exponent = [&](int64_t index) { return static_cast<uint32_t>(m_.scales[index]); };
    const uint32_t lowered = (kLargest - exponent(rows.first_scale)) << 7 | (kLargest - exponent(rows.second_scale))
                                                                                << 23;
    // 0xffff lowers every exponent to zero.
    const __m512i lowered_by = _mm512_set1_epi32(static_cast<int>(rows.has_second ? lowered : lowered | 0xffff0000U));
    const __m512i words = interleaved_rows(load_two_rows<4>(rows.first, rows.second));
    const auto look_up = [&](__m512i codes) MAXMOE_INLINE_LAMBDA {
      return _mm512_subs_epu16(ScaledE2M1::Table::look_up(codes), lowered_by);  // zeros stay zeros
    };
    return {look_up(words), look_up(_mm512_srli_epi16(words, 4))};
  }

 private:
  static constexpr uint32_t kLargest = ScaledE2M1::kLargest;
};

// 4-bit codes: for each row, the 16 values times its scale are one half of a table.
template <ScaleType kType, bool kIsHighFirst>
class TableRowPairs : public RowPairs {
 public:
  static bool fits(const QuantizedMatrix& m) {
    return bits_per_code(m.codes) == 4 && is_high_first(m.codes) == kIsHighFirst && m.scale_type == kType;
  }

  TableRowPairs(const QuantizedMatrix& m, Range depth, int64_t column)
      : RowPairs(m, depth, column), table_(_mm512_load_ps(table_of(m.codes, m.zeros != nullptr).values.data())) {}

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

// E4M3 where both rows of a step have the same scales.
class E4M3RowPairs : public RowPairs {
 public:
  static bool fits(const QuantizedMatrix& m) {
    return m.codes == Codes::e4m3 && m.log2_rows_per_scale > 0 && m.first_row % 2 == 0;
  }

  E4M3RowPairs(const QuantizedMatrix& m, Range depth, int64_t column) : RowPairs(m, depth, column), table_(0.0F) {}

  MAXMOE_INLINE PairsX2 decode() {
    const Rows rows = next();
    if (rows.first_scale != index_) {
      index_ = rows.first_scale;
      table_ = E4M3Table(m_.scale(index_));
    }
    const ValueBytes values = table_(load_two_rows<8>(rows.first, rows.second));
    const __m512i exists = _mm512_set1_epi32(rows.has_second ? -1 : 0xffff);
    return {_mm512_and_si512(pairs<0>(values), exists), _mm512_and_si512(pairs<1>(values), exists)};
  }

 private:
  // Columns of both rows from `first` on, every second one.
  template <int first>
  static MAXMOE_INLINE __m512i pairs(ValueBytes values) {
    static constexpr ByteOrder kOrder =
        byte_order([](size_t i) { return i / 2 % 2 * 32 + i / 4 * 2 + first + i % 2 * 64; });
    return _mm512_permutex2var_epi8(values.low, load_order(kOrder), values.high);
  }

  E4M3Table table_;
  int64_t index_ = -1;
};

// 8-bit codes with any scales.
template <Codes codes, ScaleType kType>
class ByteRowPairs : public RowPairs {
 public:
  static bool fits(const QuantizedMatrix& m) { return m.codes == codes && m.scale_type == kType; }

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
  using Floats = CodeFloats<codes>;

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
