// Columns of B whose codes run along the inner dimension, and their scales, with AVX-512. Only for the .cpp files that
// are compiled per instruction set.
#pragma once

#include "decode.h"
#include "row_words.h"

#if defined(MAXMOE_DECODES_PAIRS)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// 16 columns of B whose codes run along the inner dimension: column i is row rows[i] of the codes. The range `depth`
// begins at a multiple of 32.
struct CodeColumns {
  static constexpr int kColumns = 16;

  const QuantizedMatrix& m;
  int64_t rows[kColumns];
  Range depth;

  int64_t block(int64_t d) const { return (m.first_column + d) >> m.log2_columns_per_scale; }
  int64_t num_scales() const { return block(depth.end - 1) - block(depth.begin) + 1; }
};

// The scales or zero points of 16 columns, 16 bytes of each at a time.
class ScaleReader {
 public:
  ScaleReader(const CodeColumns& c, const uint8_t* scales, int64_t bytes_per_scale) : log2_bytes_(bytes_per_scale / 2) {
    bytes_.end = c.num_scales() * bytes_per_scale;
    for (int i = 0; i < CodeColumns::kColumns; ++i) {
      bytes_.rows[i] = scales + c.m.scale_index(c.rows[i], c.depth.begin) * bytes_per_scale;
    }
  }

  // The bits of the scales of block `index` of the range, in the low bits of the lanes. Those above are undefined.
  MAXMOE_INLINE __m512i bits(int64_t index) {
    const int64_t byte = index << log2_bytes_;
    if (byte / 16 != loaded_) load(byte / 16);
    return _mm512_srl_epi32(words_.words[byte % 16 / 4], _mm_cvtsi32_si128(static_cast<int>(byte % 4 * 8)));
  }

  // The same for scales of one byte, which becomes both halves of a lane.
  MAXMOE_INLINE __m512i both_halves(int64_t index) {
    if (index / 16 != loaded_) load(index / 16);
    const auto byte = static_cast<int>(index % 4);
    const __m512i control = _mm512_set1_epi32(static_cast<int>(0x80008000U) | byte | byte << 16);
    // The control counts bytes from the begin of a block of four lanes.
    const __m512i lanes = _mm512_set4_epi32(0x000c000c, 0x00080008, 0x00040004, 0);
    return _mm512_shuffle_epi8(words_.words[index % 16 / 4], _mm512_or_si512(control, lanes));
  }

 private:
  void load(int64_t index) {
    loaded_ = index;
    words_ = load_row_words(bytes_, 16 * index);
  }

  ByteRows bytes_;
  int64_t log2_bytes_;  // 0, 1 or 2: of 1, 2 or 4 bytes
  int64_t loaded_ = -1;
  RowWords words_;
};

MAXMOE_INLINE ScaleReader scales_of(const CodeColumns& c) {
  return {c, reinterpret_cast<const uint8_t*>(c.m.scales), bytes_per_scale(c.m.scale_type)};
}

// Scales as floats, from their bits in the low bits of the lanes.
MAXMOE_INLINE __m512 scales_from_bits(ScaleType type, __m512i bits) {
  switch (type) {
    case ScaleType::e8m0: {
      const __m512i exponents = _mm512_and_si512(bits, _mm512_set1_epi32(0xff));
      const __mmask16 is_subnormal = _mm512_testn_epi32_mask(exponents, exponents);
      return _mm512_castsi512_ps(
          _mm512_mask_mov_epi32(_mm512_slli_epi32(exponents, 23), is_subnormal, _mm512_set1_epi32(1 << 22)));
    }
    case ScaleType::float32:
      return _mm512_castsi512_ps(bits);
    case ScaleType::bfloat16:
      return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    default:
      return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits));
  }
}

// Whether lookup(code) * scale is neither subnormal nor infinite: values of a format are between 2^-9 and 2^9.
constexpr float kSmallestScale = 0x1p-100F;
constexpr float kLargestScale = 0x1p100F;

MAXMOE_INLINE bool is_ordinary(float scale) {
  return scale == 0.0F || (__builtin_fabsf(scale) >= kSmallestScale && __builtin_fabsf(scale) <= kLargestScale);
}

MAXMOE_INLINE bool have_ordinary_scales(const CodeColumns& c) {
  ScaleReader reader = scales_of(c);
  __mmask16 is_other = 0;
  for (int64_t i = 0; i < c.num_scales(); ++i) {
    const __m512 scale = _mm512_abs_ps(scales_from_bits(c.m.scale_type, reader.bits(i)));
    const __mmask16 is_small = _mm512_cmp_ps_mask(scale, _mm512_set1_ps(kSmallestScale), _CMP_LT_OQ);
    is_other |= _mm512_mask_cmp_ps_mask(is_small, scale, _mm512_setzero_ps(), _CMP_NEQ_OQ);
    is_other |= _mm512_cmp_ps_mask(scale, _mm512_set1_ps(kLargestScale), _CMP_NLE_UQ);
  }
  return is_other == 0;
}

// Lanes 2 i and 2 i + 1 of the first half are lane i of the vector, those of the second half lane 8 + i. A column then
// has two lanes, one for each element of a pair, and rounding both halves with vcvtne2ps2bf16 gives 16 pairs in order.
struct DoubledLanes {
  __m512i half[2];
};

MAXMOE_INLINE DoubledLanes doubled_lanes(__m512i vector) {
  const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
  const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
  return {_mm512_permutexvar_epi32(low, vector), _mm512_permutexvar_epi32(high, vector)};
}

// The same for floats, stored to `target`.
MAXMOE_INLINE void store_doubled_lanes(__m512 vector, __m512 (&target)[2]) {
  const DoubledLanes doubled = doubled_lanes(_mm512_castps_si512(vector));
  for (int half = 0; half < 2; ++half) target[half] = _mm512_castsi512_ps(doubled.half[half]);
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
