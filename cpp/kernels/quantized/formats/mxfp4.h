// MXFP4: codes E2M1 of the OCP Microscaling formats. 0, 0.5, 1, 1.5, 2, 3, 4, 6, and with the highest bit their
// negatives. Scales are powers of two.
#pragma once

#include "kernels/quantized/codes.h"
#ifdef MAXMOE_ISA_NAMESPACE
#include "kernels/quantized/decoders.simd.h"
#endif

namespace maxmoe {

struct Mxfp4 {
  static constexpr CodeTable kValues = {{0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F,  //
                                         -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F}};
  static constexpr Codes kCodes = {.bits = 4, .values = &kValues};
  using Scales = ScaleTypes<ScaleType::e8m0>;
  static constexpr std::array<NamedFormat, 1> kNames = {{{"mxfp4", 1, 32}}};
};

#ifdef MAXMOE_ISA_NAMESPACE
namespace MAXMOE_ISA_NAMESPACE {

#if MAXMOE_DECODES_PAIRS

// The largest exponent of a scale for the decoders of pairs, biased as in E8M0. Larger scales would have to raise the
// exponents of the table.
constexpr int16_t kLargestExponent = 227;

// Lookups of E2M1, times 2^(kLargestExponent - 127), as bfloat16. They read the lower 4 bits of 16: the table is there
// twice. Exponents are lowered afterwards, and a product with a scale changes no other bit. A -0 counts as +0, which
// changes no sum but one that is itself -0: lowered, it would become another number.
MAXMOE_INLINE __m512i look_up_e2m1(__m512i codes, __m512i lowered_by) {
  struct alignas(64) Table {
    uint16_t halves[32];
  };
  static constexpr Table kTable = [] {
    Table result{};
    for (size_t i = 0; i < 32; ++i) {
      const float value = Mxfp4::kValues.values[i % 16];
      const uint32_t raised = std::bit_cast<uint32_t>(value) + (uint32_t{kLargestExponent - 127} << 23);
      result.halves[i] = static_cast<uint16_t>(value == 0.0F ? 0 : raised >> 16);
    }
    return result;
  }();
  return _mm512_subs_epu16(_mm512_permutexvar_epi16(codes, _mm512_load_si512(kTable.halves)), lowered_by);
}

// Along the inner dimension.
//
// ColumnTables instead would compute tables for every 32 values. Scaling the sums of a block of the inner dimension,
// not its weights, needs 150 lines more; it took 0.98 to 1.01 of the time of a product of 1 to 8 rows, and 0.96 of the
// time of a layer with 16 tokens (D 2048, F 768, 32 experts, top 4; AMD Zen 5 class).
class ScaledE2M1 {
 public:
  static constexpr int kBits = 4;
  static constexpr bool kIsCommon = false;
  static constexpr int kMinRowsAhead = 6;
  static constexpr bool kTakesFourVectors = true;

  // With a scale of at least 2^-125, 0.5 times the scale is not subnormal.
  static bool fits(const CodeColumns& c) { return have_bytes_between(c, 2, kLargestExponent); }

  explicit ScaledE2M1(const CodeColumns& c) : scales_(scales_of(c)) {}

  // Reads the scales of block `index` of the range.
  MAXMOE_INLINE void begin_block(int64_t index) {
    // The byte of the scale as both halves of its lane.
    const __m512i exponents = scales_.both_halves(index);
    lowered_ = _mm512_slli_epi16(_mm512_sub_epi16(_mm512_set1_epi16(kLargestExponent), exponents), 7);
  }

  // The pairs of a word. Codes of two steps are shifted into place at once: vpsrlw leaves the units of vdpbf16ps free,
  // which vpmultishiftqb would share.
  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    const __m512i first = _mm512_multishift_epi64_epi8(multishift_control(0, 8, 4, 12, 32, 40, 36, 44), words);
    const __m512i second = _mm512_multishift_epi64_epi8(multishift_control(16, 24, 20, 28, 48, 56, 52, 60), words);
    WordPairs<kBits> pairs = {{first, _mm512_srli_epi16(first, 8), second, _mm512_srli_epi16(second, 8)}};
    for (__m512i& step : pairs.step) step = look_up_e2m1(step, lowered_);  // zeros stay zeros
    return pairs;
  }

 private:
  ScaleReader scales_;
  __m512i lowered_{};
};

// Across the inner dimension, as ScaledE2M1. With TableRowPairs instead 16 rows took 1.13 times the time, 64 rows 1.06
// (AMD Zen 5 class).
class E2M1RowPairs : public RowPairs {
 public:
  static bool fits(const QuantizedMatrix& m) { return m.zeros == nullptr; }

  using RowPairs::RowPairs;

  MAXMOE_INLINE PairsX2 decode() {
    const Rows rows = next();
    const auto exponent = [&](int64_t index) { return static_cast<uint32_t>(m_.scales[index]); };
    const uint32_t lowered = (kLargest - exponent(rows.first_scale)) << 7 | (kLargest - exponent(rows.second_scale))
                                                                                << 23;
    // 0xffff lowers every exponent to zero.
    const __m512i lowered_by = _mm512_set1_epi32(static_cast<int>(rows.has_second ? lowered : lowered | 0xffff0000U));
    const __m512i words = interleaved_rows(load_two_rows<4>(rows.first, rows.second));
    return {look_up_e2m1(words, lowered_by), look_up_e2m1(_mm512_srli_epi16(words, 4), lowered_by)};
  }

 private:
  static constexpr uint32_t kLargest = kLargestExponent;
};

#endif

#if defined(__AVX2__)

#if defined(__AVX512F__)
using E2M1Values = TableWords<Mxfp4>;
#else
// Without lookups of 16 floats, which only AVX-512 has. The values are bfloat16, whose two bytes are looked up. With
// lookups of floats instead 1 row took 1.13 times the time, 4 rows 1.8 (float32, AMD Zen 5 class).
class E2M1Values : public WordsOf<Mxfp4> {
 public:
  MAXMOE_INLINE E2M1Values() {
    alignas(16) uint8_t low[16];
    alignas(16) uint8_t high[16];
    for (size_t i = 0; i < 16; ++i) {
      const auto bits = std::bit_cast<uint32_t>(Mxfp4::kValues.values[i]);
      low[i] = static_cast<uint8_t>(bits >> 16);
      high[i] = static_cast<uint8_t>(bits >> 24);
    }
    low_ = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(&low[0])));
    high_ = _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(&high[0])));
  }

  // Pairs of codes 0 and 2, 4 and 6, 1 and 3, 5 and 7.
  static constexpr int kDecoded = 4;
  MAXMOE_INLINE void begin(Words words, Words (&decoded)[kDecoded]) const {
    const Words nibbles = Words{} + 0x0f0f0f0fU;
    look_up(std::bit_cast<__m256i>(words & nibbles), decoded[0], decoded[1]);
    look_up(std::bit_cast<__m256i>(words >> 4 & nibbles), decoded[2], decoded[3]);
  }
  MAXMOE_INLINE Floats value(const Words (&decoded)[kDecoded], int i) const {
    const Words pair = decoded[i % 2 * 2 + i / 4];
    return std::bit_cast<Floats>(i % 4 < 2 ? pair << 16 : pair & 0xffff0000U);
  }

 private:
  MAXMOE_INLINE void look_up(__m256i index, Words& first, Words& second) const {
    const __m256i low = _mm256_shuffle_epi8(low_, index);
    const __m256i high = _mm256_shuffle_epi8(high_, index);
    const __m256 left = _mm256_castsi256_ps(_mm256_unpacklo_epi8(low, high));
    const __m256 right = _mm256_castsi256_ps(_mm256_unpackhi_epi8(low, high));
    first = std::bit_cast<Words>(_mm256_shuffle_ps(left, right, _MM_SHUFFLE(2, 0, 2, 0)));
    second = std::bit_cast<Words>(_mm256_shuffle_ps(left, right, _MM_SHUFFLE(3, 1, 3, 1)));
  }

  __m256i low_;
  __m256i high_;
};
#endif

struct E2M1Words : E2M1Values {
  template <class T>
  static constexpr bool kMultiplies = true;
  // A value times a power of two is rounded only where its exponent is too large or small.
  template <class T>
  static constexpr bool kIsRounded = std::is_same_v<T, Float16>;
};

// To bfloat16: the values are looked up, and their exponents are raised. A table for each run instead took 1.5 times
// the time of a skinny product of 1 row, 1.35 of 4 rows, and made no difference from 16 rows on (AVX2, across the inner
// dimension, AMD Zen 5 class).
class E2M1Runs {
 public:
  explicit E2M1Runs(const QuantizedMatrix& m) : table_(RunTable<BFloat16>(m.values()).halves(1.0F, 0.0F)) {}

  MAXMOE_INLINE int64_t decode(const Run& run, BFloat16* out) const {
    if (!(run.scale >= kSmallestScale && run.scale <= kLargestScale)) return 0;
    const uint32_t exponent = (std::bit_cast<uint32_t>(run.scale) >> 23) - 127;
    const __m256i raised_by = _mm256_set1_epi16(static_cast<int16_t>(exponent << 7));
    const auto raised = [&](__m256i numbers) MAXMOE_INLINE_LAMBDA {
      const __m256i is_zero = _mm256_cmpeq_epi16(_mm256_slli_epi16(numbers, 1), _mm256_setzero_si256());
      return _mm256_add_epi16(numbers, _mm256_andnot_si256(is_zero, raised_by));
    };
    int64_t i = 0;
    for (; i + kCodesAtATime <= run.count; i += kCodesAtATime) {
      const auto numbers = table_.look_up(bytes_for_unpacking<false>(run.codes + i / 2));
      store_halves({raised(numbers.first), raised(numbers.second)}, out + i);
    }
    return i;
  }

 private:
  HalfTable table_;
};

template <>
struct DecodersOf<Mxfp4> {
#if MAXMOE_DECODES_PAIRS
  using Columns = ColumnDecoders<ScaledE2M1>;
  using Rows = RowDecoders<E2M1RowPairs>;
#endif
  using ForWords = E2M1Words;
  template <class T>
  using Runs = std::conditional_t<std::is_same_v<T, BFloat16>, E2M1Runs, TableRuns<Mxfp4, T>>;
};

#endif

}  // namespace MAXMOE_ISA_NAMESPACE
#endif

}  // namespace maxmoe
