// E2M1 along the inner dimension.
//
// A scale of E8M0 is a power of two, so that scaling changes no bit but the exponent.
//
// For few rows of A weights are multiplied without their scales, and the sums are scaled instead: while a block of the
// inner dimension is multiplied, the sums of its columns are divided by its scale. Every rounding is the same, as long
// as no number is too large or too small for float, with its scale or without: the exponents tell (UnscaledE2M1::fits).
#pragma once

#include "kernels/quantized/byte_tables.simd.h"
#include "kernels/quantized/exponents.simd.h"
#include "kernels/quantized/lines.simd.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The exponents of the scales of some columns.
MAXMOE_INLINE Exponents exponents_of_scales(const CodeColumns& c) {
  const auto* scales = reinterpret_cast<const uint8_t*>(c.m.scales);
  const int64_t count = c.num_scales();
  __m512i min = _mm512_set1_epi8(-1);
  __m512i max = _mm512_setzero_si512();
  for (const int64_t row : c.rows) {
    const uint8_t* of_row = scales + c.m.scale_index(row, c.depth.begin);
    for (int64_t i = 0; i < count; i += 64) {
      const __mmask64 mask = count - i >= 64 ? ~__mmask64{0} : (__mmask64{1} << (count - i)) - 1;
      const __m512i exponents = _mm512_maskz_loadu_epi8(mask, of_row + i);
      min = _mm512_mask_min_epu8(min, mask, min, exponents);
      max = _mm512_max_epu8(max, exponents);
    }
  }
  const __m512i low = _mm512_set1_epi16(0xff);
  return {smallest_half(_mm512_min_epu16(_mm512_and_si512(min, low), _mm512_srli_epi16(min, 8))),
          largest_half(_mm512_max_epu16(_mm512_and_si512(max, low), _mm512_srli_epi16(max, 8)))};
}

// The codes of a word, step by step, in the lower bits of 16. Codes of two steps are brought into place at once: vpsrlw
// leaves the units of vdpbf16ps free, which vpmultishiftqb would share.
MAXMOE_INLINE WordPairs<4> e2m1_codes(__m512i words) {
  const __m512i first = _mm512_multishift_epi64_epi8(multishift_control(0, 8, 4, 12, 32, 40, 36, 44), words);
  const __m512i second = _mm512_multishift_epi64_epi8(multishift_control(16, 24, 20, 28, 48, 56, 52, 60), words);
  return {{first, _mm512_srli_epi16(first, 8), second, _mm512_srli_epi16(second, 8)}};
}

// Weights with their scales: exponents are lowered. A -0 counts as +0, which changes no sum but one that is itself -0.
class ScaledE2M1 {
 public:
  static constexpr int kBits = 4;

  // With a scale of at least 2^-125, 0.5 times the scale is not subnormal. Larger scales than kLargest would have to
  // raise the exponents of the table.
  static bool fits(const CodeColumns& c) {
    if (c.m.codes != Codes::e2m1) return false;
    const Exponents of_scales = exponents_of_scales(c);
    return of_scales.min >= 2 && of_scales.max <= kLargest;
  }

  explicit ScaledE2M1(const CodeColumns& c) : scales_(scales_of(c)) {}

  // Reads the scales of block `index` of the range.
  MAXMOE_INLINE void begin_block(int64_t index) {
    // The byte of the scale as both halves of its lane.
    const __m512i exponents = scales_.both_halves(index);
    lowered_ = _mm512_slli_epi16(_mm512_sub_epi16(_mm512_set1_epi16(kLargest), exponents), 7);
  }

  // The pairs of a word.
  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    WordPairs<kBits> pairs = e2m1_codes(words);
    for (__m512i& step : pairs.step) step = _mm512_subs_epu16(Table::look_up(step), lowered_);  // zeros stay zeros
    return pairs;
  }

  // The largest exponent of a scale, biased as in E8M0.
  static constexpr int16_t kLargest = 227;
  using Table = E2M1Table<kLargest - 127>;

 private:
  ScaleReader scales_;
  __m512i lowered_{};
};

// Weights without their scales.
class UnscaledE2M1 {
 public:
  static constexpr int kBits = 4;
  static constexpr bool kIsCommon = false;
  static constexpr bool kScalesSums = true;
  static constexpr int kMinRowsAhead = 6;

  // Whether the bits are those of scaled weights, for a depth of at most 2^20. `of_a` are the exponents of the rows of
  // A, `of_sums` those of the sums that products are added to.
  static bool fits(const CodeColumns& c, Exponents of_a, Exponents of_sums) {
    if (c.m.codes != Codes::e2m1 || c.depth.size() > (int64_t{1} << 20)) return false;
    const Exponents of_b = exponents_of_scales(c);
    // What scales raise numbers by, and what dividing by them does.
    const int64_t raised = at_least(of_b.max - 127, 0);
    const int64_t divided = at_least(127 - of_b.min, 0);
    // All numbers are multiples of the last bit of the smallest product, 2^(a - 134) * 2^(b - 128), and of the smallest
    // sum, 2^(sum - 150). If these are not below 2^-126, what is smaller is zero. 0.5 times a scale is no less, either.
    const bool none_is_small =
        of_b.min >= 2 && of_a.min + of_b.min - 262 >= raised - 126 && of_sums.min - 150 >= raised - 126;
    // Products are below 2^(a - 126) * 2^(b - 124); 2^20 of them, and the rest of the sum, below 2^126 each.
    const bool none_is_large = of_a.max + of_b.max - 250 + 20 + divided <= 126 && of_sums.max - 126 + divided <= 126;
    // A factor is the ratio of two scales, or of a scale and 1.
    return none_is_small && none_is_large && raised + divided <= 126;
  }

  explicit UnscaledE2M1(const CodeColumns& c) {
    scales_.end = c.num_scales();
    for (int i = 0; i < CodeColumns::kColumns; ++i) {
      scales_.rows[i] = reinterpret_cast<const uint8_t*>(c.m.scales) + c.m.scale_index(c.rows[i], c.depth.begin);
    }
  }

  // Reads the scales of block `index` of the range; blocks are read in order. Returns by what the sums must be
  // multiplied.
  MAXMOE_INLINE __m512 begin_block(int64_t index) {
    if (index % 16 == 0) words_ = load_row_words(scales_, index);
    four_blocks_ = index % 4 == 0 ? words_.words[index / 4 % 4] : _mm512_srli_epi32(four_blocks_, 8);
    return factor_to(_mm512_and_si512(four_blocks_, _mm512_set1_epi32(0xff)));
  }

  // The factor after the last block.
  MAXMOE_INLINE __m512 end() { return factor_to(_mm512_set1_epi32(127)); }

  // The pairs of a word.
  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    WordPairs<kBits> pairs = e2m1_codes(words);
    for (__m512i& step : pairs.step) step = E2M1Table<0>::look_up(step);
    return pairs;
  }

 private:
  MAXMOE_INLINE __m512 factor_to(__m512i exponents) {
    const __m512i raised = _mm512_sub_epi32(_mm512_add_epi32(exponents_, _mm512_set1_epi32(127)), exponents);
    exponents_ = exponents;
    return _mm512_castsi512_ps(_mm512_slli_epi32(raised, 23));
  }

  ByteRows scales_;
  RowWords words_;
  __m512i four_blocks_{};
  __m512i exponents_ = _mm512_set1_epi32(127);
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
