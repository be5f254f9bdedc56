// Columns of B whose codes run along the inner dimension, and their scales, with AVX-512.
#pragma once

#include "kernels/quantized/e4m3_scales.simd.h"
#include "kernels/quantized/quantized_matrix.h"
#include "kernels/quantized/row_words.simd.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// 16 columns of B whose codes run along the inner dimension: column i is row rows[i] of the codes. The range `depth`
// begins at a multiple of 32.
struct CodeColumns {
  static constexpr int kColumns = 16;

  const QuantizedMatrix& m;
  int64_t rows[kColumns];
  Range depth;

  int64_t num_scales() const { return m.block(depth.end - 1) - m.block(depth.begin) + 1; }
};

// Objects of class Object for kVectors vectors of columns.
template <class Object, int kVectors>
struct ForVectors {
  Object of[kVectors];
};

template <class Object, int kVectors, class Make>
MAXMOE_INLINE ForVectors<Object, kVectors> for_vectors(const Make& make) {
  return [&]<int... kVector>(std::integer_sequence<int, kVector...> /*vectors*/) MAXMOE_INLINE_LAMBDA {
    return ForVectors<Object, kVectors>{{make(kVector)...}};
  }(std::make_integer_sequence<int, kVectors>());
}

// The vectors of kVectors / 2 micro-panels from columns.begin on. Columns past the end repeat the last column.
template <int kVectors>
MAXMOE_INLINE ForVectors<CodeColumns, kVectors> vectors_of_panels(const QuantizedMatrix& m, Range columns,
                                                                  Range depth) {
  return for_vectors<CodeColumns, kVectors>([&](int v) {
    CodeColumns result{m, {}, depth};
    const int64_t panel = columns.begin + v / 2 * kLanesX2<float>;
    for (int i = 0; i < CodeColumns::kColumns; ++i) {
      result.rows[i] = at_most(panel + column_of_lane<BFloat16>(v % 2, i), columns.end - 1);
    }
    return result;
  });
}

// The scales or zero points of 16 columns, 16 bytes of each at a time.
class ScaleReader {
 public:
  ScaleReader(const CodeColumns& c, const uint8_t* scales, int64_t bytes_per_scale) : log2_bytes_(bytes_per_scale / 2) {
    bytes_.end = c.num_scales() * bytes_per_scale;
    for (int i = 0; i < CodeColumns::kColumns; ++i) {
      bytes_.rows[i] = scales + c.m.scale_index(c.rows[i], c.depth.begin) * bytes_per_scale;
    }
  }

  // The bits of the scales of block `index` of the range, in the low bits of the lanes. The higher bits are undefined.
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
  int64_t log2_bytes_;  // 0, 1 or 2 for scales of 1, 2 or 4 bytes
  int64_t loaded_ = -1;
  RowWords words_;
};

MAXMOE_INLINE ScaleReader scales_of(const CodeColumns& c) {
  return {c, reinterpret_cast<const uint8_t*>(c.m.scales), bytes_per_scale(c.m.scale_type)};
}

// Whether the bytes of all scales of some columns are between two numbers.
MAXMOE_INLINE bool have_bytes_between(const CodeColumns& c, int smallest, int largest) {
  const int64_t count = c.num_scales();
  __mmask64 is_other = 0;
  for (const int64_t row : c.rows) {
    const std::byte* of_row = c.m.scales + c.m.scale_index(row, c.depth.begin);
    for (int64_t i = 0; i < count; i += 64) {
      const __mmask64 mask = count - i >= 64 ? ~__mmask64{0} : (__mmask64{1} << (count - i)) - 1;
      const __m512i scales = _mm512_maskz_loadu_epi8(mask, of_row + i);
      is_other |= _mm512_mask_cmplt_epu8_mask(mask, scales, _mm512_set1_epi8(static_cast<char>(smallest))) |
                  _mm512_mask_cmpgt_epu8_mask(mask, scales, _mm512_set1_epi8(static_cast<char>(largest)));
    }
  }
  return is_other == 0;
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
    case ScaleType::e4m3:
      return std::bit_cast<__m512>(e4m3_scales(std::bit_cast<Words>(bits) & 0xffU));
    case ScaleType::float32:
      return _mm512_castsi512_ps(bits);
    case ScaleType::bfloat16:
      return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
    default:
      return _mm512_cvtph_ps(_mm512_cvtepi32_epi16(bits));
  }
}

// The scales of 16 columns as floats, block by block.
class ColumnScales {
 public:
  explicit ColumnScales(const CodeColumns& c)
      : scales_(scales_of(c)), type_(c.m.scale_type), has_row_scales_(c.m.row_scales != nullptr) {
    alignas(64) float of_rows[CodeColumns::kColumns];
    for (int i = 0; i < CodeColumns::kColumns; ++i) of_rows[i] = c.m.row_scale(c.rows[i]);
    of_rows_ = _mm512_load_ps(of_rows);
  }

  // The scales of block `index` of the range.
  MAXMOE_INLINE __m512 floats(int64_t index) {
    const __m512 of_blocks = scales_from_bits(type_, scales_.bits(index));
    return has_row_scales_ ? _mm512_mul_ps(of_blocks, of_rows_) : of_blocks;
  }

 private:
  ScaleReader scales_;
  __m512 of_rows_;
  ScaleType type_;
  bool has_row_scales_;
};

// Which scales are below kSmallestScale, but not zero, or above kLargestScale.
MAXMOE_INLINE __mmask16 are_not_ordinary(__m512 scales) {
  const __m512 magnitudes = _mm512_abs_ps(scales);
  const __mmask16 is_small = _mm512_cmp_ps_mask(magnitudes, _mm512_set1_ps(kSmallestScale), _CMP_LT_OQ);
  return _mm512_mask_cmp_ps_mask(is_small, magnitudes, _mm512_setzero_ps(), _CMP_NEQ_OQ) |
         _mm512_cmp_ps_mask(magnitudes, _mm512_set1_ps(kLargestScale), _CMP_NLE_UQ);
}

MAXMOE_INLINE bool have_ordinary_scales(const CodeColumns& c) {
  ColumnScales scales(c);
  __mmask16 is_other = 0;
  for (int64_t i = 0; i < c.num_scales(); ++i) is_other |= are_not_ordinary(scales.floats(i));
  return is_other == 0;
}

// The bits of `count` scales, at most 16, in the low bits of the lanes. The others are zeros.
MAXMOE_INLINE __m512i load_scale_bits(ScaleType type, const std::byte* scales, int64_t count) {
  const auto mask = static_cast<__mmask16>((1U << at_most(count, 16)) - 1U);
  switch (bytes_per_scale(type)) {
    case 1:
      return _mm512_cvtepu8_epi32(_mm_maskz_loadu_epi8(mask, scales));
    case 2:
      return _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, scales));
    default:
      return _mm512_maskz_loadu_epi32(mask, scales);
  }
}

// The same for all of `m`, in the order of memory: scales of columns that are not in `m` count, too. Decoders of rows
// read no scales of rows.
MAXMOE_INLINE bool have_ordinary_scales(const QuantizedMatrix& m) {
  if (m.row_scales != nullptr) return false;
  if (m.rows <= 0 || m.columns <= 0) return true;
  const int64_t bytes = bytes_per_scale(m.scale_type);
  const int64_t end = m.scale_index(m.rows - 1, m.columns - 1) + 1;
  __mmask16 is_other = 0;
  for (int64_t i = m.scale_index(0, 0); i < end; i += 16) {
    const __m512i bits = load_scale_bits(m.scale_type, m.scales + i * bytes, end - i);
    is_other |= are_not_ordinary(scales_from_bits(m.scale_type, bits));
  }
  return is_other == 0;
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
