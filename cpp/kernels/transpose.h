// Transposes blocks of rows, converting them on the way. Only for the .cpp files that are compiled per instruction set.
#pragma once

#include <cstdint>

#ifdef __SSE2__
#include <immintrin.h>
#endif

#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Four rows of `count` elements become four columns of `target`. Elements of 4 bytes, floats or bfloat16 pairs, are
// shuffled in 4 x 4 blocks of SSE registers.
template <class Element>
MAXMOE_INLINE void transpose_four(const Element (&rows)[4][kColumnBlock], int64_t count, Element* target,
                                  int64_t target_stride) {
  int64_t i = 0;
#ifdef __SSE2__
  if constexpr (sizeof(Element) == sizeof(float)) {
    const auto load = [&](int r) { return _mm_loadu_ps(reinterpret_cast<const float*>(&rows[r][i])); };
    const auto store = [&](int64_t r, __m128 column) {
      _mm_storeu_ps(reinterpret_cast<float*>(target + (i + r) * target_stride), column);
    };
    for (; i + 4 <= count; i += 4) {
      __m128 r0 = load(0);
      __m128 r1 = load(1);
      __m128 r2 = load(2);
      __m128 r3 = load(3);
      _MM_TRANSPOSE4_PS(r0, r1, r2, r3);
      store(0, r0);
      store(1, r1);
      store(2, r2);
      store(3, r3);
    }
  }
#endif
  for (; i < count; ++i) {
    for (int r = 0; r < 4; ++r) target[i * target_stride + r] = rows[r][i];
  }
}

// target[c, r] = source[r, c], where copy(r, c, count, buffer) writes `count` elements of row r of the source, from
// column c on, to the buffer. Rows are read in consecutive pieces of kColumnBlock elements.
template <class Element, class Copy>
MAXMOE_INLINE void transpose_rows(int64_t num_rows, int64_t num_columns, const Copy& copy, Element* target,
                                  int64_t target_stride) {
  Element buffer[4][kColumnBlock];
  for (int64_t begin = 0; begin < num_columns; begin += kColumnBlock) {
    const int64_t size = at_most(num_columns - begin, kColumnBlock);
    Element* block = target + begin * target_stride;
    int64_t r = 0;
    for (; r + 4 <= num_rows; r += 4) {
      for (int i = 0; i < 4; ++i) copy(r + i, begin, size, buffer[i]);
      transpose_four(buffer, size, block + r, target_stride);
    }
    for (; r < num_rows; ++r) {
      copy(r, begin, size, buffer[0]);
      for (int64_t i = 0; i < size; ++i) block[i * target_stride + r] = buffer[0][i];
    }
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
