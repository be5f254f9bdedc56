// FP8: E4M3 of the OCP 8-bit floating-point formats.
#pragma once

#include "kernels/quantized/codes.h"
#ifdef MAXMOE_ISA_NAMESPACE
#include "kernels/quantized/decoders.simd.h"
#endif

namespace maxmoe {

struct Fp8 {
  static constexpr Codes kCodes = {.bits = 8, .type = ByteType::float8_e4m3};
  MAXMOE_INLINE static float value(uint8_t code) { return value_of_e4m3(code); }
  using Scales = FloatScales;
  static constexpr std::array<NamedFormat, 2> kNames = {{{"fp8_row", 1, kWholeRow}, {"fp8_block", 128, 128}}};
};

#ifdef MAXMOE_ISA_NAMESPACE
namespace MAXMOE_ISA_NAMESPACE {

#if MAXMOE_DECODES_PAIRS

// E4M3 times one scale, rounded to bfloat16.
class E4M3Table {
 public:
  explicit E4M3Table(float scale) {
    const float* values = kE4M3Magnitudes.values;
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

// E4M3: bfloat16 holds the values exactly. Their bytes, which are looked up, are the upper halves of floats.
class E4M3Floats {
 public:
  static constexpr float kUnit = 1.0F;
  using Table = E4M3Table;
  static Table table() { return Table(1.0F); }

  E4M3Floats(const Table& table, __m512i codes) : values_(table(codes)) {}

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

// Along the inner dimension, where all columns have the same scales, as in blocks of 128 x 128: a lookup in a table of
// scaled values.
class ScaledE4M3Table {
 public:
  static constexpr int kBits = 8;
  static constexpr bool kIsCommon = true;
  static constexpr int kMinRowsAhead = 6;
  static constexpr bool kTakesFourVectors = false;

  static bool fits(const CodeColumns& c) {
    for (const int64_t row : c.rows) {
      if (c.m.scale_index(row, 0) != c.m.scale_index(c.rows[0], 0)) return false;
    }
    return have_ordinary_scales(c);
  }

  explicit ScaledE4M3Table(const CodeColumns& c)
      : m_(c.m), first_(c.m.scale_index(c.rows[0], c.depth.begin)), table_(0.0F) {}

  MAXMOE_INLINE void begin_block(int64_t index) { table_ = E4M3Table(m_.scale(first_ + index)); }

  // The pairs of a word.
  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    // In each block of four columns: the bytes of the first step, then the bytes of the second one.
    const ValueBytes values =
        table_(_mm512_shuffle_epi8(words, _mm512_set4_epi32(0x0f0e0b0a, 0x07060302, 0x0d0c0908, 0x05040100)));
    return {{_mm512_unpacklo_epi8(values.low, values.high), _mm512_unpackhi_epi8(values.low, values.high)}};
  }

 private:
  const QuantizedMatrix& m_;
  int64_t first_;
  E4M3Table table_;
};

// Along the inner dimension, with any scales: the values are looked up.
class ScaledE4M3 : public DoubledScales {
 public:
  static constexpr int kBits = 8;
  static constexpr bool kIsCommon = false;
  static constexpr int kMinRowsAhead = 6;
  static constexpr bool kTakesFourVectors = false;

  static bool fits(const CodeColumns& c) { return have_ordinary_scales(c); }

  explicit ScaledE4M3(const CodeColumns& c) : DoubledScales(c) {}

  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    // vpunpck*bw makes the lower 8 bytes of each block of 16 the first step, and the others the second one. Even values
    // then belong to columns 0 to 7, odd values to columns 8 to 15.
    static constexpr ByteOrder kOrder = byte_order([](size_t i) {
      const size_t column = i / 16 * 2 + i / 4 % 2 + i % 2 * 8;
      const size_t element = i / 8 % 2 * 2 + i / 2 % 2;
      return 4 * column + element;
    });
    const ValueBytes values = table_(_mm512_permutexvar_epi8(load_order(kOrder), words));
    return {
        {scaled(_mm512_unpacklo_epi8(values.low, values.high)), scaled(_mm512_unpackhi_epi8(values.low, values.high))}};
  }

 private:
  MAXMOE_INLINE __m512i scaled(__m512i values) const {
    const __m512i odd = _mm512_and_si512(values, _mm512_set1_epi32(static_cast<int>(0xffff0000)));
    return scaled_pairs(_mm512_castsi512_ps(_mm512_slli_epi32(values, 16)), _mm512_castsi512_ps(odd));
  }

  E4M3Table table_{1.0F};
};

// Across the inner dimension, where both rows of a step have the same scales.
class E4M3RowPairs : public RowPairs {
 public:
  static bool fits(const QuantizedMatrix& m) { return m.log2_rows_per_scale > 0 && m.first_row % 2 == 0; }

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

#endif

#if defined(__AVX2__)

// The exponents of the codes in a float, whose bias is 120 larger. Subnormal codes become subnormal floats.
struct E4M3Words : WordsOf<Fp8> {
  // Not if the thread takes subnormal operands as zeros, as after torch.set_flush_denormal(True).
  static bool fits() { return _MM_GET_DENORMALS_ZERO_MODE() != _MM_DENORMALS_ZERO_ON; }

  MAXMOE_INLINE Floats value(const Words (&decoded)[kDecoded], int i) const {
    return std::bit_cast<Floats>(std::bit_cast<Words>(std::bit_cast<SignedWords>(at_top(decoded[0], i)) >> 4) &
                                 0x87f00000U);
  }

  // Not exact if a code is a NaN, or if a scale times kScale could be infinite.
  static constexpr bool kIsAlwaysExact = false;
  static constexpr float kScale = 0x1p120F;
  static MAXMOE_INLINE Words inexact_scales(Floats scale) {
    const Floats magnitude = std::bit_cast<Floats>(std::bit_cast<Words>(scale) & 0x7fffffffU);
    return std::bit_cast<Words>(!(magnitude <= Floats{} + 0x1p7F));
  }
  static MAXMOE_INLINE Words inexact_codes(Words words) {
    // 0x7f is a NaN: adding 1 carries into the highest bit of the byte.
    return ((words & 0x7f7f7f7fU) + 0x01010101U) & 0x80808080U;
  }
};

// E4M3 as float16, whose exponent bias is 8 larger. The conversion to float takes subnormal numbers as they are.
MAXMOE_INLINE Floats32 floats_of_e4m3(const uint8_t* source) {
  Floats32 floats;
  for (int i = 0; i < 2; ++i) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(source + int64_t{16} * i));
    const __m256i shifted = _mm256_srai_epi16(_mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8), 1);
    const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
    const __m256i largest = _mm256_set1_epi16(0x3f80);
    const __m256i is_nan = _mm256_cmpeq_epi16(_mm256_and_si256(halves, largest), largest);
    // 0x3f80 becomes 0x7e00, a NaN.
    const __m256i result = _mm256_xor_si256(halves, _mm256_and_si256(is_nan, _mm256_set1_epi16(0x3f80 ^ 0x7e00)));
    floats.of[2 * i] = _mm256_cvtph_ps(_mm256_castsi256_si128(result));
    floats.of[2 * i + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(result, 1));
  }
  for (__m256& x : floats.of) x = _mm256_mul_ps(x, _mm256_set1_ps(256.0F));
  return floats;
}

// E4M3 to bfloat16. A code is m / 8 + 1 times a power of two; the numbers of m are rounded alike for each power, unless
// one is subnormal or infinite. Entry i of the table is the number of code i; codes 0 to 7 are subnormal. A code above
// 15 takes an entry from 8 to 15, whose exponent is raised by the exponent of the code less 1.
class E4M3Halves {
 public:
  explicit E4M3Halves(const QuantizedMatrix& /*m*/) : table_(kE4M3Magnitudes.values) {}

  MAXMOE_INLINE int64_t decode(const Run& run, BFloat16* out) const {
    const float magnitude = __builtin_fabsf(run.scale);
    if (!(magnitude >= kSmallestScale && magnitude <= kLargestScale)) return 0;
    const HalfTable table(table_.halves(run.scale, 0.0F));
    const auto bytes = [](int value) { return _mm256_set1_epi8(static_cast<int8_t>(value)); };
    int64_t i = 0;
    for (; i + kCodesAtATime <= run.count; i += kCodesAtATime) {
      const __m256i source = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(run.codes + i));
      const __m256i codes = _mm256_permute4x64_epi64(source, 0xd8);  // unpacking takes 8 codes of each half
      const __m256i magnitudes = _mm256_and_si256(codes, bytes(0x7f));
      if (_mm256_movemask_epi8(_mm256_cmpeq_epi8(magnitudes, bytes(0x7f))) != 0) break;  // a NaN
      // A code above 15 has the index, 8 to 15, with the same lower 3 bits.
      const __m256i index = _mm256_min_epu8(magnitudes, _mm256_or_si256(_mm256_and_si256(codes, bytes(7)), bytes(8)));
      const __m256i raised = _mm256_sub_epi8(magnitudes, index);  // 8 times the number that is added to the exponent
      const __m256i signs = _mm256_and_si256(codes, bytes(0x80));
      // The sum is to wrap around: adding 0x8000 changes the sign.
      const auto sum = [&](__m256i numbers, __m256i raised_by, __m256i sign) MAXMOE_INLINE_LAMBDA {
        return _mm256_add_epi16(numbers, _mm256_or_si256(_mm256_slli_epi16(raised_by, 4), sign));
      };
      const auto numbers = table.look_up(index);
      const __m256i zero = _mm256_setzero_si256();
      store_halves({sum(numbers.first, _mm256_unpacklo_epi8(raised, zero), _mm256_unpacklo_epi8(zero, signs)),
                    sum(numbers.second, _mm256_unpackhi_epi8(raised, zero), _mm256_unpackhi_epi8(zero, signs))},
                   out + i);
    }
    return i;
  }

 private:
  RunTable<BFloat16> table_;
};

template <class T>
class E4M3Runs {
 public:
  explicit E4M3Runs(const QuantizedMatrix& m) : halves_(m) {}

  MAXMOE_INLINE int64_t decode(const Run& run, T* out) const {
    int64_t decoded = 0;
    if constexpr (std::is_same_v<T, BFloat16>) decoded = halves_.decode(run, out);
    if (decoded > 0) return decoded;
    return decode_floats(
        run, out, [](const uint8_t* codes, int64_t i) MAXMOE_INLINE_LAMBDA { return floats_of_e4m3(codes + i); });
  }

 private:
  [[maybe_unused]] E4M3Halves halves_;
};

template <>
struct DecodersOf<Fp8> {
#if MAXMOE_DECODES_PAIRS
  using Columns = ColumnDecoders<ScaledE4M3Table, ScaledE4M3>;
  using Rows = ByteRowDecoders<E4M3Floats, Fp8::Scales, E4M3RowPairs>;
#endif
  using ForWords = E4M3Words;
  template <class T>
  using Runs = E4M3Runs<T>;
};

#endif

}  // namespace MAXMOE_ISA_NAMESPACE
#endif

}  // namespace maxmoe
