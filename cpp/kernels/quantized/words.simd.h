// Reads codes of several columns in transposed words of 32 bits, and decodes words to floats.
#pragma once

#include "kernels/isa/transpose.simd.h"
#include "kernels/quantized/e4m3_scales.simd.h"
#include "kernels/quantized/quantized_matrix.h"

#if defined(__AVX2__)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

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
    for (int lane = 0; lane < kLanes<float>; ++lane) {
      first_[lane] = m.scale_index(row_of_lane(lane), 0);
      of_rows_[lane] = m.row_scale(row_of_lane(lane));
    }
  }

  // The scales of block `index` of the inner dimension. A NaN becomes one that rounding to bfloat16 keeps.
  MAXMOE_INLINE Floats scales(int64_t index) const {
    const auto read = [&](ScaleType type) MAXMOE_INLINE_LAMBDA {
      Floats scales{};
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes<float>; ++lane) scales[lane] = read_scale(type, scales_, first_[lane] + index);
      return with_quiet_nan(scales);
    };
    // As read_scale, in vectors: blocks of MXFP4 have 32 codes, and lane by lane they took 1.1 times the time.
    const auto bytes = [&]() MAXMOE_INLINE_LAMBDA {
      Words words{};
#pragma GCC unroll 16
      for (int lane = 0; lane < kLanes<float>; ++lane) {
        words[lane] = static_cast<uint32_t>(scales_[first_[lane] + index]);
      }
      return words;
    };
    // The type is a constant in each loop.
    switch (type_) {
      case ScaleType::e8m0: {
        const Words exponents = bytes();
        return std::bit_cast<Floats>(exponents == 0 ? Words{} + (1U << 22) : exponents << 23);
      }
      case ScaleType::e4m3:
        return with_quiet_nan(e4m3_scales(bytes()) * of_rows_);
      case ScaleType::float32:
        return read(ScaleType::float32);
      case ScaleType::bfloat16:
        return read(ScaleType::bfloat16);
      default:
        return read(ScaleType::float16);
    }
  }

  // The zero points of block `index`; `otherwise` without any.
  MAXMOE_INLINE Floats zeros(int64_t index, float otherwise) const {
    Floats zeros = Floats{} + otherwise;
    for (int lane = 0; zeros_ != nullptr && lane < kLanes<float>; ++lane) zeros[lane] = zeros_[first_[lane] + index];
    return zeros;
  }

 private:
  static MAXMOE_INLINE Floats with_quiet_nan(Floats scales) {
    return scales == scales ? scales : Floats{} + __builtin_nanf("");
  }

  ScaleType type_;
  const std::byte* scales_;
  const uint8_t* zeros_;
  int64_t first_[kLanes<float>];
  Floats of_rows_{};
};

// Base of the decoders of words of a format, with what most formats do. A decoder has the values of the codes of a
// word, before they are scaled: value(decoded, i) returns the values of code i of each lane, after begin(word,
// decoded). `decoded` is an array of the caller: in an object that is returned, the compiler does not keep vectors in
// registers.
template <class Format>
class WordsOf {
 public:
  static constexpr int kCodesPerWord = 32 / Format::kCodes.bits;
  // A format with zero points has this table, and kZero is its default. The pointer in kCodes is no constant where
  // sanitizers check pointers.
  static constexpr bool kHasZeros = requires { Format::kValuesWithZeros; };
  // Whether products of T are faster so than with rows that decode_rows.simd.h decodes. For 16-bit types most formats
  // are faster with tables of rounded values.
  template <class T>
  static constexpr bool kMultiplies = std::is_same_v<T, float>;
  static bool fits() { return true; }
  // Whether scaled values must be rounded to T.
  template <class T>
  static constexpr bool kIsRounded = true;
  // Otherwise inexact_scales and inexact_codes return lanes that are not zero where the decoder is not exact, and
  // scales are multiplied by kScale.
  static constexpr bool kIsAlwaysExact = true;

  static constexpr int kDecoded = 1;
  MAXMOE_INLINE void begin(Words words, Words (&decoded)[kDecoded]) const { decoded[0] = words; }

 protected:
  // The position of code i in a word, from its lowest bit on.
  static constexpr int position(int i) {
    return Format::kCodes.is_high_first ? i / 2 * 8 + (1 - i % 2) * 4 : i * Format::kCodes.bits;
  }
  // Shifts the highest bit of code i to the highest bit of the word.
  static MAXMOE_INLINE Words at_top(Words words, int i) { return words << (32 - Format::kCodes.bits - position(i)); }
};

// Codes of 4 bits, whose values are looked up.
template <class Format>
class TableWords : public WordsOf<Format> {
 public:
  static_assert(!TableWords::kHasZeros);

  MAXMOE_INLINE TableWords() {
    const float* const values = Format::kValues.values.data();
    for (int i = 0; i < kTables; ++i) table_[i] = load_vector(values + i * kLanes<float>);
  }

  MAXMOE_INLINE Floats value(const Words (&decoded)[1], int i) const {
    const auto index = decoded[0] >> this->position(i);
#if defined(__AVX512F__)
    return _mm512_permutexvar_ps(std::bit_cast<__m512i>(index), table_[0]);
#else
    const __m256 low = _mm256_permutevar8x32_ps(table_[0], std::bit_cast<__m256i>(index));
    const __m256 high = _mm256_permutevar8x32_ps(table_[1], std::bit_cast<__m256i>(index));
    return _mm256_blendv_ps(low, high, std::bit_cast<__m256>(this->at_top(decoded[0], i)));
#endif
  }

 private:
  static constexpr int kTables = 16 / kLanes<float>;

  Floats table_[kTables];
};

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
