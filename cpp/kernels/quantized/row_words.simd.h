// Bytes of 16 rows, transposed in registers with AVX-512.
#pragma once

#include "kernels/isa/transpose.simd.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// 16 bytes of each of 16 rows, transposed: lane i of words[w] is word w of row i.
struct RowWords {
  __m512i words[4];
};

// 16 rows of bytes, which are read from `offset` on up to `end`. Bytes past the end are zeros.
struct ByteRows {
  const uint8_t* rows[16];
  int64_t end;
};

// Bytes [offset, offset + 16) of four rows.
MAXMOE_INLINE __m512i load_four_rows(const ByteRows& source, int64_t offset, int a, int b, int c, int d) {
  const auto load = [&](auto load_one) MAXMOE_INLINE_LAMBDA {
    __m512i x = _mm512_castsi128_si512(load_one(source.rows[a] + offset));
    x = _mm512_inserti32x4(x, load_one(source.rows[b] + offset), 1);
    x = _mm512_inserti32x4(x, load_one(source.rows[c] + offset), 2);
    return _mm512_inserti32x4(x, load_one(source.rows[d] + offset), 3);
  };
  const int64_t count = source.end - offset;
  if (count >= 16) {
    return load([](const uint8_t* row)
                    MAXMOE_INLINE_LAMBDA { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(row)); });
  }
  const auto mask = static_cast<__mmask16>((1U << count) - 1U);
  return load([mask](const uint8_t* row) MAXMOE_INLINE_LAMBDA { return _mm_maskz_loadu_epi8(mask, row); });
}

MAXMOE_INLINE RowWords load_row_words(const ByteRows& source, int64_t offset) {
  Vector<uint32_t> words[4];
#pragma GCC unroll 4
  for (int r = 0; r < 4; ++r) {
    // Block b of a vector is of row 4 b + r, so that the lanes of the transposed words are in the order of the rows.
    words[r] = std::bit_cast<Vector<uint32_t>>(load_four_rows(source, offset, r, 4 + r, 8 + r, 12 + r));
  }
  transpose_within_blocks<uint32_t>(words);
  RowWords result;
  std::memcpy(&result, words, sizeof(words));
  return result;
}

// Controls of vpmultishiftqb, which puts 8 bits from any bit of a lane of 64 bits into each of its bytes: bytes 0 to 7
// of all lanes begin at these bits.
MAXMOE_INLINE __m512i multishift_control(int64_t b0, int64_t b1, int64_t b2, int64_t b3, int64_t b4, int64_t b5,
                                         int64_t b6, int64_t b7) {
  return _mm512_set1_epi64(
      static_cast<int64_t>(static_cast<uint64_t>((b0 & 63) | (b1 & 63) << 8 | (b2 & 63) << 16 | (b3 & 63) << 24 |
                                                 (b4 & 63) << 32 | (b5 & 63) << 40 | (b6 & 63) << 48) |
                           static_cast<uint64_t>(b7 & 63) << 56));
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
