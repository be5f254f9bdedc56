// INT8: -128 to 127.
#pragma once

#include "kernels/quantized/codes.h"
#ifdef MAXMOE_ISA_NAMESPACE
#include "kernels/quantized/decoders.simd.h"
#endif

namespace maxmoe {

struct Int8 {
  static constexpr Codes kCodes = {.bits = 8, .type = ByteType::int8};
  MAXMOE_INLINE static float value(uint8_t code) { return static_cast<float>(static_cast<int8_t>(code)); }
  using Scales = FloatScales;
  static constexpr std::array<NamedFormat, 1> kNames = {{{"int8", 1, kWholeRow}}};
};

#ifdef MAXMOE_ISA_NAMESPACE
namespace MAXMOE_ISA_NAMESPACE {

#if MAXMOE_DECODES_PAIRS

// The highest byte of 32 bits counts 2^24 times.
class Int8Floats {
 public:
  static constexpr float kUnit = 0x1p24F;
  struct Table {};
  static Table table() { return {}; }

  Int8Floats(Table /*table*/, __m512i codes) : codes_(codes) {}

  // Lane i is the float of code Place()(i).
  template <class Place>
  MAXMOE_INLINE __m512 lanes() const {
    static constexpr ByteOrder kOrder = byte_order([](size_t i) { return Place()(i / 4); });
    return _mm512_cvtepi32_ps(_mm512_maskz_permutexvar_epi8(0x8888888888888888, load_order(kOrder), codes_));
  }

 private:
  __m512i codes_;
};

// Along the inner dimension, with any scales.
class ScaledInt8 : public DoubledScales {
 public:
  static constexpr int kBits = 8;
  static constexpr bool kIsCommon = false;
  static constexpr int kMinRowsAhead = 6;
  static constexpr bool kTakesFourVectors = false;

  static bool fits(const CodeColumns& c) { return have_ordinary_scales(c); }

  explicit ScaledInt8(const CodeColumns& c) : DoubledScales(c, 1.0F / Int8Floats::kUnit) {}

  MAXMOE_INLINE WordPairs<kBits> decode(__m512i words) const {
    const Int8Floats floats({}, words);
    return {{step<0>(floats), step<2>(floats)}};
  }

 private:
  // Lanes alternate between the elements `first` and first + 1 of 8 columns, the ones below 8 or the others.
  template <size_t first, size_t half>
  struct Place {
    constexpr size_t operator()(size_t lane) const { return 4 * (8 * half + lane / 2) + first + lane % 2; }
  };
  template <size_t first>
  MAXMOE_INLINE __m512i step(const Int8Floats& floats) const {
    return scaled_pairs(floats.lanes<Place<first, 0>>(), floats.lanes<Place<first, 1>>());
  }
};

#endif

#if defined(__AVX2__)

struct Int8Words : WordsOf<Int8> {
  template <class T>
  static constexpr bool kMultiplies = true;

  MAXMOE_INLINE Floats value(const Words (&decoded)[kDecoded], int i) const {
    return __builtin_convertvector(std::bit_cast<SignedWords>(at_top(decoded[0], i)) >> 24, Floats);
  }
};

template <class T>
struct Int8Runs {
  explicit Int8Runs(const QuantizedMatrix& /*m*/) {}

  MAXMOE_INLINE int64_t decode(const Run& run, T* out) const {
    return decode_floats(run, out, [](const uint8_t* codes, int64_t i) MAXMOE_INLINE_LAMBDA {
      Floats32 floats;
      for (int k = 0; k < 4; ++k) {
        const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + i + int64_t{8} * k));
        floats.of[k] = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(bytes));
      }
      return floats;
    });
  }
};

template <>
struct DecodersOf<Int8> {
#if MAXMOE_DECODES_PAIRS
  using Columns = ColumnDecoders<ScaledInt8>;
  using Rows = ByteRowDecoders<Int8Floats, Int8::Scales>;
#endif
  using ForWords = Int8Words;
  template <class T>
  using Runs = Int8Runs<T>;
};

#endif

}  // namespace MAXMOE_ISA_NAMESPACE
#endif

}  // namespace maxmoe
