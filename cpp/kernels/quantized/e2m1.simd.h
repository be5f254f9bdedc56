// E2M1 along the inner dimension, with scales that are powers of two.
#pragma once

#include "kernels/quantized/byte_tables.simd.h"
#include "kernels/quantized/lines.simd.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Whether the bytes of all scales of some columns are between two numbers.
MAXMOE_INLINE bool have_scales_between(const CodeColumns& c, int smallest, int largest) {
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

// The codes of a word, step by step, in the lower bits of 16. Codes of two steps are shifted into place at once: vpsrlw
// leaves the units of vdpbf16ps free, which vpmultishiftqb would share.
MAXMOE_INLINE WordPairs<4> e2m1_codes(__m512i words) {
  const __m512i first = _mm512_multishift_epi64_epi8(multishift_control(0, 8, 4, 12, 32, 40, 36, 44), words);
  const __m512i second = _mm512_multishift_epi64_epi8(multishift_control(16, 24, 20, 28, 48, 56, 52, 60), words);
  return {{first, _mm512_srli_epi16(first, 8), second, _mm512_srli_epi16(second, 8)}};
}

// A bfloat16 is looked up, and its exponent is lowered: a product with the scale changes no other bit. A -0 counts as
// +0, which changes no sum but one that is itself -0.
//
// MXFP4 with ColumnTables instead would compute tables for every 32 values. Scaling the sums of a block of the inner
// dimension, not its weights, needs 150 lines more; it took 0.98 to 1.01 of the time of a product of 1 to 8 rows, and
// 0.96 of the time of a layer with 16 tokens (D 2048, F 768, 32 experts, top 4; AMD Zen 5 class).
class ScaledE2M1 {
 public:
  static constexpr int kBits = 4;
  static constexpr bool kIsCommon = false;
  static constexpr int kMinRowsAhead = 6;

  // With a scale of at least 2^-125, 0.5 times the scale is not subnormal. Larger scales than kLargest would have to
  // raise the exponents of the table.
  static bool fits(const CodeColumns& c) { return c.m.codes == Codes::e2m1 && have_scales_between(c, 2, kLargest); }

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

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
