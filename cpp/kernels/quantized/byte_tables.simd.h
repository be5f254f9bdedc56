// Lookups of codes as bfloat16 with AVX512-VBMI.
#pragma once

#include <array>

#include "kernels/quantized/row_words.simd.h"
#include "kernels/quantized/value_tables.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// An index of vpermb and vpermi2b.
struct alignas(64) ByteOrder {
  std::array<uint8_t, 64> bytes;
};

// The order in which byte i is byte place(i) of the source.
template <class Place>
constexpr ByteOrder byte_order(const Place& place) {
  ByteOrder order{};
  for (size_t i = 0; i < 64; ++i) order.bytes[i] = static_cast<uint8_t>(place(i));
  return order;
}

MAXMOE_INLINE __m512i load_order(const ByteOrder& order) {
  return _mm512_load_si512(order.bytes.data());
}

// The bytes of 64 values.
struct ValueBytes {
  __m512i low;
  __m512i high;
};

// A table of 128 values, two registers with their lower bytes and two with their upper bytes.
struct ValueTable {
  __m512i low[2];
  __m512i high[2];

  // 128 values of bfloat16, in order.
  static MAXMOE_INLINE ValueTable of(const __m512i (&values)[4]) {
    static constexpr ByteOrder kIndices = byte_order([](size_t i) { return i; });
    const __m512i even = _mm512_add_epi8(load_order(kIndices), load_order(kIndices));
    const __m512i odd = _mm512_add_epi8(even, _mm512_set1_epi8(1));
    return {
        {_mm512_permutex2var_epi8(values[0], even, values[1]), _mm512_permutex2var_epi8(values[2], even, values[3])},
        {_mm512_permutex2var_epi8(values[0], odd, values[1]), _mm512_permutex2var_epi8(values[2], odd, values[3])}};
  }
  // Lookups by the lower 7 bits.
  MAXMOE_INLINE __m512i low_of(__m512i codes) const { return _mm512_permutex2var_epi8(low[0], codes, low[1]); }
  MAXMOE_INLINE __m512i high_of(__m512i codes) const { return _mm512_permutex2var_epi8(high[0], codes, high[1]); }
};

// first * of_first, then second * of_second, rounded to bfloat16.
MAXMOE_INLINE __m512i rounded_products(__m512 first, __m512 of_first, __m512 second, __m512 of_second) {
  return std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(_mm512_mul_ps(second, of_second), _mm512_mul_ps(first, of_first)));
}

// 32 products of consecutive floats and a scale, rounded to bfloat16.
MAXMOE_INLINE __m512i rounded_products(const float* values, float scale) {
  const __m512 factor = _mm512_set1_ps(scale);
  return rounded_products(_mm512_load_ps(values), factor, _mm512_load_ps(values + 16), factor);
}

// E4M3 times one scale, rounded to bfloat16.
class E4M3Table {
 public:
  explicit E4M3Table(float scale) {
    const float* values = kE4M3.values;
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

// 64 codes of 8 bits, of which 16 at a time become floats: their values times kUnit.
template <Codes codes>
class CodeFloats;

// E4M3: bfloat16 holds the values exactly. Their bytes, which are looked up, are the upper halves of floats.
template <>
class CodeFloats<Codes::e4m3> {
 public:
  static constexpr float kUnit = 1.0F;
  using Table = E4M3Table;
  static Table table() { return Table(1.0F); }

  CodeFloats(const Table& table, __m512i codes) : values_(table(codes)) {}

  // Lane i is the float of code Place()(i).
  template <class Place>
  MAXMOE_INLINE __m512 lanes() const {
    static constexpr ByteOrder kOrder = byte_order([](size_t i) { return Place()(i / 4) + i % 2 * 64; });
    return _mm512_castsi512_ps(
        _mm512_maskz_permutex2var_epi8(0xcccccccccccccccc, values_.low, load_order(kOrder), values_.high));
  }

 private:
  ValueBytes values_;
};

// Integers: the highest byte of 32 bits counts 2^24 times.
template <>
class CodeFloats<Codes::int8> {
 public:
  static constexpr float kUnit = 0x1p24F;
  struct Table {};
  static Table table() { return {}; }

  CodeFloats(Table /*table*/, __m512i codes) : codes_(codes) {}

  // Lane i is the float of code Place()(i).
  template <class Place>
  MAXMOE_INLINE __m512 lanes() const {
    static constexpr ByteOrder kOrder = byte_order([](size_t i) { return Place()(i / 4); });
    return _mm512_cvtepi32_ps(_mm512_maskz_permutexvar_epi8(0x8888888888888888, load_order(kOrder), codes_));
  }

 private:
  __m512i codes_;
};

// Lookups of E2M1, times 2^kExponent, as bfloat16. They read the lower 4 bits of 16: the table is there twice.
template <int kExponent>
class E2M1Table {
 public:
  static MAXMOE_INLINE __m512i look_up(__m512i codes) {
    static constexpr Values kValues = values();
    return _mm512_permutexvar_epi16(codes, _mm512_load_si512(kValues.halves));
  }

 private:
  struct alignas(64) Values {
    uint16_t halves[32];
  };
  static constexpr Values values() {
    Values result{};
    for (size_t i = 0; i < 32; ++i) {
      const uint32_t bits = std::bit_cast<uint32_t>(kE2M1.values[i % 16]);
      const uint32_t exponent = uint32_t{kExponent} << 23;
      // If exponents are lowered afterwards, the table has no -0, which would become another number.
      const uint32_t raised = kExponent != 0 && kE2M1.values[i % 16] == 0.0F ? 0 : bits + exponent;
      result.halves[i] = static_cast<uint16_t>(raised >> 16);
    }
    return result;
  }
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
