// Lookups of 8-bit codes as bfloat16 with AVX512-VBMI. Only for the .cpp files that are compiled per instruction set.
#pragma once

#include <array>

#include "quantized_matrix.h"
#include "row_words.h"

#if defined(MAXMOE_DECODES_PAIRS)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

MAXMOE_INLINE __m512i bytes_0_to_63() {
  alignas(64) static constexpr auto kBytes = [] {
    std::array<uint8_t, 64> bytes{};
    for (size_t i = 0; i < 64; ++i) bytes[i] = static_cast<uint8_t>(i);
    return bytes;
  }();
  return _mm512_load_si512(kBytes.data());
}

// The bytes of 64 values.
struct ValueBytes {
  __m512i low;
  __m512i high;

  // Pairs of bytes `first` and `second` of each word of four codes.
  template <int first, int second>
  MAXMOE_INLINE __m512i pairs() const {
    // In each lane: low of first, high of first, low of second, high of second.
    const __m512i words = _mm512_and_si512(bytes_0_to_63(), _mm512_set1_epi32(static_cast<int>(0xfcfcfcfc)));
    const __m512i bytes = _mm512_set1_epi32(first | (64 + first) << 8 | second << 16 | (64 + second) << 24);
    return _mm512_permutex2var_epi8(low, _mm512_or_si512(words, bytes), high);
  }
};

// A table of 128 values, two registers with their lower bytes and two with their upper bytes.
struct ValueTable {
  __m512i low[2];
  __m512i high[2];

  // 128 values of bfloat16, in order.
  static MAXMOE_INLINE ValueTable of(const __m512i (&values)[4]) {
    const __m512i even = _mm512_add_epi8(bytes_0_to_63(), bytes_0_to_63());
    const __m512i odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));
    return {
        {_mm512_permutex2var_epi8(values[0], even, values[1]), _mm512_permutex2var_epi8(values[2], even, values[3])},
        {_mm512_permutex2var_epi8(values[0], odd, values[1]), _mm512_permutex2var_epi8(values[2], odd, values[3])}};
  }
  // Lookups by the lower 7 bits.
  MAXMOE_INLINE __m512i low_of(__m512i codes) const { return _mm512_permutex2var_epi8(low[0], codes, low[1]); }
  MAXMOE_INLINE __m512i high_of(__m512i codes) const { return _mm512_permutex2var_epi8(high[0], codes, high[1]); }
};

// The magnitudes of E4M3.
struct E4M3Magnitudes {
  alignas(64) float values[128];
};

constexpr E4M3Magnitudes e4m3_magnitudes() {
  E4M3Magnitudes result{};
  for (int code = 0; code < 127; ++code) {
    float value = static_cast<float>(code < 8 ? code : 8 + code % 8) * 0x1p-9F;
    for (int exponent = 1; exponent < code / 8; ++exponent) value *= 2.0F;
    result.values[code] = value;
  }
  result.values[127] = __builtin_nanf("");
  return result;
}

// 32 products of consecutive floats and a scale, rounded to bfloat16.
MAXMOE_INLINE __m512i rounded_products(const float* values, float scale) {
  const auto product = [&](const float* source) MAXMOE_INLINE_LAMBDA {
    return _mm512_mul_ps(_mm512_load_ps(source), _mm512_set1_ps(scale));
  };
  return std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(product(values + 16), product(values)));
}

// E4M3 times one scale, rounded to bfloat16.
class E4M3Table {
 public:
  explicit E4M3Table(float scale) {
    static constexpr E4M3Magnitudes kMagnitudes = e4m3_magnitudes();
    const float* values = kMagnitudes.values;
    table_ = ValueTable::of({rounded_products(values, scale), rounded_products(values + 32, scale),
                             rounded_products(values + 64, scale), rounded_products(values + 96, scale)});
  }

  MAXMOE_INLINE ValueBytes operator()(__m512i codes) const {
    // The sign: high ^ (codes & 0x80).
    return {table_.low_of(codes),
            _mm512_ternarylogic_epi32(table_.high_of(codes), codes, _mm512_set1_epi8(static_cast<char>(0x80)), 0x78)};
  }

 private:
  ValueTable table_;
};

// The integers from -128 to 127, which bfloat16 holds exactly.
class Int8Table {
 public:
  Int8Table() {
    for (int half = 0; half < 2; ++half) {
      __m512i values[4];
      for (int i = 0; i < 4; ++i) {
        alignas(64) float integers[32];
        for (int lane = 0; lane < 32; ++lane) integers[lane] = static_cast<float>(32 * i + lane - 128 * half);
        values[i] = rounded_products(static_cast<const float*>(integers), 1.0F);
      }
      tables_[half] = ValueTable::of(values);
    }
  }

  MAXMOE_INLINE ValueBytes operator()(__m512i codes) const {
    const __mmask64 is_negative = _mm512_movepi8_mask(codes);
    return {_mm512_mask_mov_epi8(tables_[0].low_of(codes), is_negative, tables_[1].low_of(codes)),
            _mm512_mask_mov_epi8(tables_[0].high_of(codes), is_negative, tables_[1].high_of(codes))};
  }

 private:
  ValueTable tables_[2];
};

// The table of the values of 8-bit codes.
template <Codes codes>
struct ByteTable : Int8Table {};
template <>
struct ByteTable<Codes::e4m3> : E4M3Table {
  ByteTable() : E4M3Table(1.0F) {}
};

// Multiplies the first elements of pairs by `first` and the second ones by `second`, rounded.
MAXMOE_INLINE __m512i scaled_pairs(__m512i pairs, __m512 first, __m512 second) {
  const __m512 low = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)), first);
  const __m512 high = _mm512_mul_ps(
      _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000)))), second);
  // All first elements, then all second ones.
  const auto rounded = std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  alignas(64) static constexpr auto kInterleaved = [] {
    std::array<uint16_t, 32> words{};
    for (size_t i = 0; i < 32; ++i) words[i] = static_cast<uint16_t>(i / 2 + i % 2 * 16);
    return words;
  }();
  return _mm512_permutexvar_epi16(_mm512_load_si512(kInterleaved.data()), rounded);
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
