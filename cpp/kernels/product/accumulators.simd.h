// The sums of a product in registers.
#pragma once

#include "kernels/isa/vector.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The sums of kRows rows and kVectors vectors of columns, which are `stride` apart in memory. All loops over them are
// unrolled, as 12 is the largest kRows and 8 the largest kVectors: the compiler keeps an array in registers only if all
// of its indices are constants.
template <class S, int kRows, int kVectors>
struct Accumulators {
  Vector<S> of[kRows][kVectors];

  MAXMOE_INLINE Accumulators(const S* sums, int64_t stride, bool accumulate) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) {
        of[r][v] = accumulate ? load_vector(sums + r * stride + v * kLanes<S>) : Vector<S>{};
      }
    }
  }
  MAXMOE_INLINE void store(S* sums, int64_t stride) const {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
      for (int v = 0; v < kVectors; ++v) store_vector<S>(sums + r * stride + v * kLanes<S>, of[r][v]);
    }
  }
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
