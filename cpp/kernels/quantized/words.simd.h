// Reads codes of several columns in transposed words of 32 bits, and decodes words to floats.
#pragma once

#include "kernels/isa/transpose.simd.h"
#include "kernels/quantized/value_tables.h"

#if defined(__AVX2__)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

using Words = Vector<uint32_t>;
using Floats = Vector<float>;

// The codes of kLanes columns, which are rows of `m`, a cache line of each at a time.
class WordReader {
 public:
  static constexpr int kWords = kCacheLineBytes / 4;  // words per line

  template <class Row>
  MAXMOE_INLINE WordReader(const QuantizedMatrix& m, const Row& row_of_lane) : end_(m.bytes_of(m.columns)) {
    for (int lane = 0; lane < kLanes<float>; ++lane) rows_[lane] = m.code(row_of_lane(lane), 0);
  }

  // words[i] are bytes 4 i to 4 i + 3 of the line from byte `first` on. Bytes past the end are zeros. Not inlined: its
  // code is long, and the kernels would have several copies.
  __attribute__((noinline)) void read(int64_t first, Words* words) const {
    const int64_t count = at_most(end_ - first, kCacheLineBytes);
    alignas(kCacheLineBytes) uint8_t padded[kLanes<float>][kCacheLineBytes];
    const uint8_t* lines[kLanes<float>];
    for (int lane = 0; lane < kLanes<float>; ++lane) lines[lane] = rows_[lane] + first;
    if (count < kCacheLineBytes) {
      std::memset(padded, 0, sizeof(padded));
      for (int lane = 0; lane < kLanes<float>; ++lane) {
        std::memcpy(padded[lane], lines[lane], static_cast<size_t>(count));
        lines[lane] = padded[lane];
      }
    }
    for (int i = 0; i < kWords; i += kLanes<float>) {
      Words block[kLanes<float>];
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes<float>; ++lane) std::memcpy(&block[lane], lines[lane] + 4 * i, sizeof(Words));
      transpose_square<uint32_t>(block);
#pragma GCC unroll 16
      for (int k = 0; k < kLanes<float>; ++k) words[i + k] = block[k];
    }
  }

 private:
  const uint8_t* rows_[kLanes<float>];
  int64_t end_;
};

// The scales and zero points of kLanes columns.
class LaneScales {
 public:
  template <class Row>
  MAXMOE_INLINE LaneScales(const QuantizedMatrix& m, const Row& row_of_lane)
      : type_(m.scale_type), scales_(m.scales), zeros_(m.zeros) {
    for (int lane = 0; lane < kLanes<float>; ++lane) first_[lane] = m.scale_index(row_of_lane(lane), 0);
  }

  // The scales of block `index` of the inner dimension. A NaN becomes one that rounding to bfloat16 keeps.
  MAXMOE_INLINE Floats scales(int64_t index) const {
    const auto read = [&](ScaleType type) MAXMOE_INLINE_LAMBDA {
      Floats scales{};
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes<float>; ++lane) scales[lane] = read_scale(type, scales_, first_[lane] + index);
      return scales == scales ? scales : Floats{} + __builtin_nanf("");
    };
    // The type is a constant in each loop.
    switch (type_) {
      case ScaleType::e8m0: {
        // As read_scale, in vectors: blocks of MXFP4 have 32 codes, and lane by lane they took 1.1 times the time.
        Words exponents{};
#pragma GCC unroll 16
        for (int lane = 0; lane < kLanes<float>; ++lane) {
          exponents[lane] = static_cast<uint32_t>(scales_[first_[lane] + index]);
        }
        return std::bit_cast<Floats>(exponents == 0 ? Words{} + (1U << 22) : exponents << 23);
      }
      case ScaleType::float32:
        return read(ScaleType::float32);
      case ScaleType::bfloat16:
        return read(ScaleType::bfloat16);
      default:
        return read(ScaleType::float16);
    }
  }

  // The zero points of block `index`, for INT4.
  MAXMOE_INLINE Floats zeros(int64_t index) const {
    Floats zeros = Floats{} + 8.0F;
    for (int lane = 0; zeros_ != nullptr && lane < kLanes<float>; ++lane) zeros[lane] = zeros_[first_[lane] + index];
    return zeros;
  }

 private:
  ScaleType type_;
  const std::byte* scales_;
  const uint8_t* zeros_;
  int64_t first_[kLanes<float>];
};

// The values of the codes of a word, before they are scaled: value(decoded, i) returns the values of code i of each
// lane, after begin(word, decoded). `decoded` is an array of the caller: in an object that is returned, the compiler
// does not keep vectors in registers.
template <Codes kCodes>
class WordDecoder {
  using Signed = VectorOf<int32_t, kVectorBytes>::type;

 public:
  static constexpr int kCodesPerWord = 32 / bits_per_code(kCodes);
  // A factor of the scale: E4M3 has the exponents of its codes in a float, whose bias is 120 larger.
  static constexpr float kScale = kCodes == Codes::e4m3 ? 0x1p120F : 1.0F;

  MAXMOE_INLINE WordDecoder() {
    if constexpr (kCodes == Codes::nf4 || kCodes == Codes::e2m1) {
      const float* const values = table_of(kCodes, false).values.data();
      for (int i = 0; i < kTables; ++i) table_[i] = load_vector(values + i * kLanes<float>);
    }
  }

  static constexpr int kDecoded = 1;
  MAXMOE_INLINE void begin(Words words, Words (&decoded)[kDecoded]) const { decoded[0] = words; }
  MAXMOE_INLINE Floats value(const Words (&decoded)[kDecoded], int i) const { return value(decoded[0], i); }

 private:
  static constexpr int kBits = bits_per_code(kCodes);
  static constexpr int kTables = 16 / kLanes<float>;

  // The position of code i in a word, from its lowest bit on.
  static constexpr int position(int i) { return is_high_first(kCodes) ? i / 2 * 8 + (1 - i % 2) * 4 : i * kBits; }
  // Shifts the highest bit of code i to the highest bit of the word.
  static MAXMOE_INLINE Words at_top(Words words, int i) { return words << (32 - kBits - position(i)); }

  MAXMOE_INLINE Floats value(Words words, int i) const {
    if constexpr (kCodes == Codes::int8) {
      return __builtin_convertvector(std::bit_cast<Signed>(at_top(words, i)) >> 24, Floats);
    } else if constexpr (kCodes == Codes::e4m3) {
      // Subnormal numbers become subnormal floats.
      return std::bit_cast<Floats>(std::bit_cast<Words>(std::bit_cast<Signed>(at_top(words, i)) >> 4) & 0x87f00000U);
    } else if constexpr (kCodes == Codes::int4) {
      return __builtin_convertvector(std::bit_cast<Signed>(words >> position(i) & 15U), Floats);
    } else {
      const auto index = words >> position(i);
#if defined(__AVX512F__)
      return _mm512_permutexvar_ps(std::bit_cast<__m512i>(index), table_[0]);
#else
      const __m256 low = _mm256_permutevar8x32_ps(table_[0], std::bit_cast<__m256i>(index));
      const __m256 high = _mm256_permutevar8x32_ps(table_[1], std::bit_cast<__m256i>(index));
      return _mm256_blendv_ps(low, high, std::bit_cast<__m256>(at_top(words, i)));
#endif
    }
  }

  Floats table_[kTables];
};

#if !defined(__AVX512F__)

// E2M1 without lookups of 16 floats. The values are bfloat16, whose two bytes are looked up. With lookups of floats
// instead 1 row took 1.13 times the time, 4 rows 1.8 (float32, AMD Zen 5 class).
template <>
class WordDecoder<Codes::e2m1> {
 public:
  static constexpr int kCodesPerWord = 8;

  MAXMOE_INLINE WordDecoder() {
    alignas(16) uint8_t low[16];
    alignas(16) uint8_t high[16];
    for (size_t i = 0; i < 16; ++i) {
      const auto bits = std::bit_cast<uint32_t>(kE2M1.values[i]);
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

// Rounds to T, and back to float. The NaN of a scale stays a NaN.
template <class T>
MAXMOE_INLINE Floats rounded(Floats x) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto bits = std::bit_cast<Words>(x);
    return std::bit_cast<Floats>((bits + 0x7fffU + (bits >> 16 & 1U)) & 0xffff0000U);
  } else if constexpr (std::is_same_v<T, Float16>) {
#if defined(__AVX512F__)
    return _mm512_cvtph_ps(std::bit_cast<__m256i>(round_to_float16(x)));
#else
    return _mm256_cvtph_ps(std::bit_cast<__m128i>(round_to_float16(x)));
#endif
  } else {
    return x;
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
