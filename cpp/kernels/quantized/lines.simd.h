// Cache lines of codes of 16 columns, transposed.
#pragma once

#include "kernels/quantized/columns.simd.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// A word is four bytes of codes of each of 16 columns. These are the pairs of bfloat16 that it holds, step by step.
template <int kBits>
struct WordPairs {
  __m512i step[16 / kBits];
  MAXMOE_INLINE __m512i operator()(int i) const { return step[i]; }
};

// Number of codes in a cache line, and in a word.
template <int kBits>
constexpr int64_t kCodesPerLine = 8 * kCacheLineBytes / kBits;
template <int kBits>
constexpr int64_t kCodesPerWord = 32 / kBits;

// A cache line of codes of each column at a time. The columns of a matrix with a power of two of rows share a few sets
// of the first-level cache: a line that is read in parts would be evicted before the next part is read.
class LineReader {
 public:
  // `ahead`: the distance in bytes of the codes that are prefetched.
  LineReader(const CodeColumns& c, int64_t ahead) : ahead_(ahead) {
    bytes_.end = c.m.bytes_of(c.depth.size());
    for (int i = 0; i < CodeColumns::kColumns; ++i) bytes_.rows[i] = c.m.code(c.rows[i], c.depth.begin);
  }

  // words[w] holds bytes 4 w to 4 w + 3 of the next line, lane i the bytes of column i. Bytes past the end are zeros.
  // Not inlined: its code is long, and each kernel would have a copy for each vector of columns.
  __attribute__((noinline)) void next(__m512i* words) {
    Vector<uint32_t> lines[16];
    const __mmask64 mask = existing_bytes();
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) {
      lines[i] = std::bit_cast<Vector<uint32_t>>(_mm512_maskz_loadu_epi8(mask, bytes_.rows[i] + offset_));
    }
    transpose_square<uint32_t>(lines);
#pragma GCC unroll 16
    for (int i = 0; i < 16; ++i) _mm512_store_si512(words + i, std::bit_cast<__m512i>(lines[i]));
    advance();
  }

  // The stages of `next`, for a quarter of the line at a time: first_stage for groups 0 to 3, then second_stage for
  // groups 0 to 3, then advance().
  MAXMOE_INLINE void first_stage(int64_t group, __m512i* words) const {
    const __mmask64 mask = existing_bytes();
    Vector<uint32_t> rows[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      rows[r] = std::bit_cast<Vector<uint32_t>>(_mm512_maskz_loadu_epi8(mask, bytes_.rows[4 * group + r] + offset_));
    }
    transpose_within_blocks<uint32_t>(rows);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) _mm512_store_si512(words + 4 * group + r, std::bit_cast<__m512i>(rows[r]));
  }
  static MAXMOE_INLINE void second_stage(int64_t group, __m512i* words) {
    Vector<uint32_t> rows[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) rows[r] = std::bit_cast<Vector<uint32_t>>(_mm512_load_si512(words + 4 * r + group));
    transpose_blocks<uint32_t>(rows[0], rows[1], rows[2], rows[3]);
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) _mm512_store_si512(words + 4 * r + group, std::bit_cast<__m512i>(rows[r]));
  }
  MAXMOE_INLINE void advance() { offset_ += kCacheLineBytes; }

  // Prefetches the next line of column i, and the line `ahead` bytes after the current one.
  MAXMOE_INLINE void prefetch(int64_t i) const {
    __builtin_prefetch(bytes_.rows[i] + offset_, /*write*/ 0, /*locality: L1*/ 3);
    // The rows may be pages apart, where hardware prefetchers stop.
    __builtin_prefetch(bytes_.rows[i] + offset_ - kCacheLineBytes + ahead_, /*write*/ 0, /*locality: L2*/ 2);
  }

 private:
  // The bytes of the next line that exist: none after the last line.
  MAXMOE_INLINE __mmask64 existing_bytes() const {
    const int64_t count = bytes_.end - offset_;
    if (count >= kCacheLineBytes) return ~__mmask64{0};
    return count > 0 ? (__mmask64{1} << count) - 1 : 0;
  }

  ByteRows bytes_;
  int64_t ahead_;
  int64_t offset_ = 0;
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
