// Codes that run along the inner dimension to pairs of bfloat16: a step is 16 columns of two elements. Only for the
// .cpp files that are compiled per instruction set.
//
// There is a class for each way to decode. `fits` tells whether it gives the bits of the definition for some columns
// and depth: instructions of AVX512-BF16 treat subnormals as zero. What fits none is decoded to floats
// (pack_quantized.cpp).
#pragma once

#include "byte_tables.h"
#include "code_columns.h"
#include "integer_factors.h"

#if defined(MAXMOE_DECODES_PAIRS)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// E2M1 with scales that are powers of two: a bfloat16 is looked up, and its exponent is lowered. A -0 counts as +0,
// which changes no sum but one that is itself -0.
class E2M1Pairs {
 public:
  static constexpr int kBits = 4;

  // Neither may the exponent be raised, nor 0.5 times the scale be subnormal.
  static bool fits(const CodeColumns& c) {
    if (c.m.codes != Codes::e2m1) return false;
    const auto* scales = reinterpret_cast<const uint8_t*>(c.m.scales);
    const int64_t count = c.num_scales();
    __mmask64 is_outside = 0;
    for (const int64_t row : c.rows) {
      const uint8_t* of_row = scales + c.m.scale_index(row, c.depth.begin);
      for (int64_t i = 0; i < count; i += 64) {
        const __mmask64 mask = count - i >= 64 ? ~__mmask64{0} : (__mmask64{1} << (count - i)) - 1;
        const __m512i exponents = _mm512_maskz_loadu_epi8(mask, of_row + i);
        is_outside |=
            _mm512_mask_cmpgt_epu8_mask(mask, _mm512_sub_epi8(exponents, _mm512_set1_epi8(2)), _mm512_set1_epi8(125));
      }
    }
    return is_outside == 0;
  }

  explicit E2M1Pairs(const CodeColumns& c) : scales_(scales_of(c)) {}

  // Reads the scales of block `index` of the range.
  MAXMOE_INLINE void begin_block(int64_t index) {
    // The byte of the scale as both halves of its lane; then (127 - exponent) << 7.
    const __m512i exponents = scales_.both_halves(index);
    lowered_ = _mm512_slli_epi16(_mm512_sub_epi16(_mm512_set1_epi16(127), exponents), 7);
  }

  using Chunk = RowWords;
  static MAXMOE_INLINE Chunk load(const ByteRows& source, int64_t offset) { return load_row_words(source, offset); }

  // Step `step` of a chunk. The lookup ignores the bits above a code, because the table is there twice.
  template <int step>
  MAXMOE_INLINE __m512i decode(const Chunk& codes) const {
    constexpr int kBit = step % 4 * 8;
    const __m512i index = _mm512_multishift_epi64_epi8(
        multishift_control(kBit, 0, kBit + 4, 0, 32 + kBit, 0, 36 + kBit, 0), codes.words[step / 4]);
    return _mm512_subs_epu16(_mm512_permutexvar_epi16(index, table()), lowered_);  // zeros stay zeros
  }

 private:
  static MAXMOE_INLINE __m512i table() {
    alignas(64) static constexpr uint16_t kValues[32] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                         0, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0,
                                                         0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0,
                                                         0, 0xbf00, 0xbf80, 0xbfc0, 0xc000, 0xc040, 0xc080, 0xc0c0};
    return _mm512_load_si512(kValues);
  }

  ScaleReader scales_;
  __m512i lowered_{};
};

// 4-bit codes of any table, with scales and zero points of any type.
template <bool kIsHighFirst>
class TablePairs {
 public:
  static constexpr int kBits = 4;

  static bool fits(const CodeColumns& c) {
    return bits_per_code(c.m.codes) == 4 && is_high_first(c.m.codes) == kIsHighFirst && have_ordinary_scales(c);
  }

  explicit TablePairs(const CodeColumns& c)
      : scales_(scales_of(c)),
        zeros_(c, c.m.zeros, 1),
        table_(_mm512_load_ps(table_of(c.m.codes, c.m.zeros != nullptr).values.data())),
        type_(c.m.scale_type),
        has_zeros_(c.m.zeros != nullptr) {}

  MAXMOE_INLINE void begin_block(int64_t index) {
    store_doubled_lanes(scales_from_bits(type_, scales_.bits(index)), scale_);
    if (!has_zeros_) return;
    const __m512i zeros = _mm512_and_si512(zeros_.bits(index), _mm512_set1_epi32(0xff));
    store_doubled_lanes(_mm512_cvtepi32_ps(zeros), zero_);
  }

  using Chunk = RowQuads;
  static MAXMOE_INLINE Chunk load(const ByteRows& source, int64_t offset) { return load_row_quads(source, offset); }

  template <int step>
  MAXMOE_INLINE __m512i decode(const Chunk& codes) const {
    constexpr int kBit = step % 8 * 8;
    const __m512i control = kIsHighFirst ? multishift_control(kBit + 4, 0, 0, 0, kBit, 0, 0, 0)
                                         : multishift_control(kBit, 0, 0, 0, kBit + 4, 0, 0, 0);
    __m512 values[2];
#pragma GCC unroll 2
    for (int half = 0; half < 2; ++half) {
      const __m512i index = _mm512_multishift_epi64_epi8(control, codes.quads[step / 8][half]);
      values[half] = _mm512_permutexvar_ps(index, table_);
      if (has_zeros_) values[half] = _mm512_sub_ps(values[half], zero_[half]);
      values[half] = _mm512_mul_ps(values[half], scale_[half]);
    }
    return std::bit_cast<__m512i>(_mm512_cvtne2ps_pbh(values[1], values[0]));
  }

 private:
  ScaleReader scales_;
  ScaleReader zeros_;
  __m512 table_;
  __m512 scale_[2];
  __m512 zero_[2];
  ScaleType type_;
  bool has_zeros_;
};

// Integers with scales of 16 bits.
class IntegerPairs : public IntegerFactors {
 public:
  static constexpr int kBits = 4;

  using IntegerFactors::IntegerFactors;

  using Chunk = RowQuads;
  static MAXMOE_INLINE Chunk load(const ByteRows& source, int64_t offset) { return load_row_quads(source, offset); }

  template <int step>
  MAXMOE_INLINE __m512i decode(const Chunk& codes) const {
    constexpr int kBit = step / 2 * 2 % 8 * 8;
    const auto& [first, second] = codes.quads[step / 8];
    return std::bit_cast<__m512i>(
        _mm512_cvtne2ps_pbh(scaled(in_place(second, kBit), step % 2, 1), scaled(in_place(first, kBit), step % 2, 0)));
  }
};

// E4M3 where all columns have the same scales, as in blocks of 128 x 128.
class E4M3Pairs {
 public:
  static constexpr int kBits = 8;

  static bool fits(const CodeColumns& c) {
    if (c.m.codes != Codes::e4m3) return false;
    const int64_t first = c.m.scale_index(c.rows[0], c.depth.begin);
    for (const int64_t row : c.rows) {
      if (c.m.scale_index(row, c.depth.begin) != first) return false;
    }
    return have_ordinary_scales(c);
  }

  explicit E4M3Pairs(const CodeColumns& c) : m_(c.m), first_(c.m.scale_index(c.rows[0], c.depth.begin)), table_(0.0F) {}

  MAXMOE_INLINE void begin_block(int64_t index) { table_ = E4M3Table(m_.scale(first_ + index)); }

  using Chunk = RowWords;
  static MAXMOE_INLINE Chunk load(const ByteRows& source, int64_t offset) { return load_row_words(source, offset); }

  template <int step>
  MAXMOE_INLINE __m512i decode(const Chunk& codes) const {
    constexpr int kFirst = step % 2 * 2;
    return table_(codes.words[step / 2]).template pairs<kFirst, kFirst + 1>();
  }

 private:
  const QuantizedMatrix& m_;
  int64_t first_;
  E4M3Table table_;
};

// 8-bit codes with any scales: their values are looked up, and multiplied by the scales of their columns.
template <Codes codes>
class BytePairs {
 public:
  static constexpr int kBits = 8;

  static bool fits(const CodeColumns& c) { return c.m.codes == codes && have_ordinary_scales(c); }

  explicit BytePairs(const CodeColumns& c) : scales_(scales_of(c)), type_(c.m.scale_type) {}

  MAXMOE_INLINE void begin_block(int64_t index) { scale_ = scales_from_bits(type_, scales_.bits(index)); }

  using Chunk = RowWords;
  static MAXMOE_INLINE Chunk load(const ByteRows& source, int64_t offset) { return load_row_words(source, offset); }

  template <int step>
  MAXMOE_INLINE __m512i decode(const Chunk& chunk) const {
    constexpr int kFirst = step % 2 * 2;
    return scaled_pairs(table_(chunk.words[step / 2]).template pairs<kFirst, kFirst + 1>(), scale_, scale_);
  }

 private:
  ByteTable<codes> table_;
  ScaleReader scales_;
  __m512 scale_{};
  ScaleType type_;
};

// Number of steps in 16 bytes of codes.
template <class Pairs>
constexpr int kStepsPerChunk = 64 / Pairs::kBits;

// Calls body<step>(pairs) for each step in 16 bytes of codes.
template <class Pairs, class Body>
MAXMOE_INLINE void for_each_step(const Pairs& pairs, const typename Pairs::Chunk& codes, const Body& body) {
  [&]<int... step>(std::integer_sequence<int, step...>) MAXMOE_INLINE_LAMBDA {
    (body.template operator()<step>(pairs.template decode<step>(codes)), ...);
  }(std::make_integer_sequence<int, kStepsPerChunk<Pairs>>());
}

// Calls body.operator()<Pairs>() with the class that fits; returns false if there is none.
template <class Body>
MAXMOE_INLINE bool with_pairs(const CodeColumns& first, const CodeColumns& second, const Body& body) {
  const auto try_class = [&]<class Pairs> {
    if (!Pairs::fits(first) || !Pairs::fits(second)) return false;
    body.template operator()<Pairs>();
    return true;
  };
  return try_class.template operator()<E2M1Pairs>() || try_class.template operator()<IntegerPairs>() ||
         try_class.template operator()<TablePairs<false>>() || try_class.template operator()<TablePairs<true>>() ||
         try_class.template operator()<E4M3Pairs>() || try_class.template operator()<BytePairs<Codes::e4m3>>() ||
         try_class.template operator()<BytePairs<Codes::int8>>();
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
