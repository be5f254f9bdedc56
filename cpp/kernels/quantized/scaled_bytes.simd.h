// 8-bit codes along the inner dimension: every weight is scaled.
#pragma once

#include "kernels/quantized/byte_tables.simd.h"
#include "kernels/quantized/lines.simd.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The scales of 16 columns: of columns 0 to 7 twice, then of columns 8 to 15 twice. A column has two lanes, one for
// each element of a pair, and rounding both vectors with vcvtne2ps2bf16 gives 16 pairs in order.
class DoubledScales {
 public:
  // Scales are multiplied by `unit`.
  explicit DoubledScales(const CodeColumns& c, float unit = 1.0F) : scales_(c), unit_(_mm512_set1_ps(unit)) {}

  MAXMOE_INLINE void begin_block(int64_t index) {
    const __m512i scale = _mm512_castps_si512(_mm512_mul_ps(scales_.floats(index), unit_));
    const __m512i low = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    scale_[0] = _mm512_castsi512_ps(_mm512_permutexvar_epi32(low, scale));
    scale_[1] = _mm512_castsi512_ps(_mm512_permutexvar_epi32(high, scale));
  }

  // The pairs of a step, from the elements of columns 0 to 7 and of columns 8 to 15; the two of a column are
  // neighbours.
  MAXMOE_INLINE __m512i scaled_pairs(__m512 first, __m512 second) const {
    return rounded_products(first, scale_[0], second, scale_[1]);
  }

 private:
  ColumnScales scales_;
  __m512 scale_[2]{};
  __m512 unit_;
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
