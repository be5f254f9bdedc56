// NVFP4: codes E2M1 as in MXFP4, blocks of 16 with scales E4M3, and a float for each row, which is the same for all
// rows of a matrix in published checkpoints.
#pragma once

#include "kernels/quantized/codes.h"
#include "kernels/quantized/formats/mxfp4.h"
#ifdef MAXMOE_ISA_NAMESPACE
#include "kernels/quantized/decoders.simd.h"
#endif

namespace maxmoe {

struct Nvfp4 {
  static constexpr CodeTable kValues = Mxfp4::kValues;
  static constexpr Codes kCodes = {.bits = 4, .values = &kValues};
  using Scales = ScaleTypes<ScaleType::e4m3>;
  static constexpr std::array<NamedFormat, 1> kNames = {{{"nvfp4", 1, 16, true}}};
};

#ifdef MAXMOE_ISA_NAMESPACE
namespace MAXMOE_ISA_NAMESPACE {

#if defined(__AVX2__)

struct Nvfp4Words : E2M1Values {
  template <class T>
  static constexpr bool kMultiplies = true;
};

// The values are bfloat16, whose two bytes are looked up, and which become floats: a block has a single vector of
// codes, for which a table of its scaled values would be computed.
template <class T>
class Nvfp4Runs {
 public:
  explicit Nvfp4Runs(const QuantizedMatrix& m) {
    alignas(16) uint8_t bytes[2][16];
    for (size_t i = 0; i < 16; ++i) {
      const auto bits = std::bit_cast<uint32_t>(m.values().values[i]);
      bytes[0][i] = static_cast<uint8_t>(bits >> 16);
      bytes[1][i] = static_cast<uint8_t>(bits >> 24);
    }
    for (int i = 0; i < 2; ++i) tables_[i] = _mm_load_si128(reinterpret_cast<const __m128i*>(&bytes[i][0]));
  }

  MAXMOE_INLINE int64_t decode(const Run& run, T* out) const {
    if (!std::isfinite(run.scale)) return 0;
    const __m256 scale = _mm256_set1_ps(run.scale);
    int64_t i = 0;
    for (; i + kColumns <= run.count; i += kColumns) {
      const __m128i words = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(run.codes + i / 2)));
      const __m128i codes = _mm_and_si128(_mm_or_si128(words, _mm_slli_epi16(words, 4)), _mm_set1_epi8(0xf));
      const __m128i low = _mm_shuffle_epi8(tables_[0], codes);
      const __m128i high = _mm_shuffle_epi8(tables_[1], codes);
      const auto scaled = [&](__m128i halves) MAXMOE_INLINE_LAMBDA {
        return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16)), scale);
      };
      store_16_floats(scaled(_mm_unpacklo_epi8(low, high)), scaled(_mm_unpackhi_epi8(low, high)), out + i);
    }
    return i;
  }

 private:
  static constexpr int64_t kColumns = 16;

  __m128i tables_[2];
};

template <>
struct DecodersOf<Nvfp4> {
#if MAXMOE_DECODES_PAIRS
  using Columns = ColumnDecoders<ColumnTables>;
  using Rows = RowDecoders<>;
#endif
  using ForWords = Nvfp4Words;
  template <class T>
  using Runs = Nvfp4Runs<T>;
};

#endif

}  // namespace MAXMOE_ISA_NAMESPACE
#endif

}  // namespace maxmoe
