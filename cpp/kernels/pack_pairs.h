// Packing of codes as pairs of bfloat16. Only for the .cpp files that are compiled per instruction set.
#pragma once

#include "column_pairs.h"
#include "pack.h"
#include "row_pairs.h"

#if defined(MAXMOE_DECODES_PAIRS)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The two vectors of a panel as columns of codes. Columns past the end are those of the last one.
MAXMOE_INLINE CodeColumns code_columns(const QuantizedMatrix& m, Range columns, Range depth, int vector) {
  CodeColumns result{m, {}, depth};
  for (int i = 0; i < CodeColumns::kColumns; ++i) {
    result.rows[i] = at_most(columns.begin + column_of_lane<BFloat16>(vector, i), columns.end - 1);
  }
  return result;
}

// The codes of the columns of a vector, 16 bytes of each at a time.
class CodeReader {
 public:
  static constexpr int64_t kBytes = 16;

  // At a distance of `ahead` bytes codes are prefetched.
  CodeReader(const CodeColumns& c, int64_t ahead) : ahead_(ahead) {
    bytes_.end = c.m.bytes_of(c.depth.size());
    for (int i = 0; i < CodeColumns::kColumns; ++i) bytes_.rows[i] = c.m.code(c.rows[i], c.depth.begin);
  }

  template <class Pairs>
  MAXMOE_INLINE Pairs::Chunk next() {
    // Once per cache line. The rows may be pages apart, where hardware prefetchers stop.
    if (offset_ % kCacheLineBytes == 0) {
      for (const uint8_t* row : bytes_.rows) {
        __builtin_prefetch(row + offset_ + ahead_, /*write*/ 0, /*locality: L2*/ 2);
      }
    }
    const auto codes = Pairs::load(bytes_, offset_);
    offset_ += kBytes;
    return codes;
  }

 private:
  ByteRows bytes_;
  int64_t ahead_;
  int64_t offset_ = 0;
};

// Calls body(d, index) for the chunks of a range of the inner dimension that 16 bytes of codes hold, with the number of
// a block of columns when one begins, otherwise -1.
template <int64_t kChunk, class Body>
MAXMOE_INLINE void for_each_chunk(const CodeColumns& c, const Body& body) {
  int64_t last = -1;
  for (int64_t d = c.depth.begin; d < c.depth.end; d += kChunk) {
    const int64_t index = c.block(d) - c.block(c.depth.begin);
    body(d, index == last ? -1 : index);
    last = index;
  }
}

// Prefetch distance of codes that are packed.
constexpr int64_t kPackPrefetchBytes = 4 * kCacheLineBytes;

// pack_panel_along_depth with AVX512-BF16; false if the codes fit no class of column_pairs.h.
MAXMOE_INLINE bool pack_pairs_along_depth(const QuantizedMatrix& m, Range columns, Range depth, BFloat16Pair* panel) {
  const CodeColumns of_vector[2] = {code_columns(m, columns, depth, 0), code_columns(m, columns, depth, 1)};
  return with_pairs(of_vector[0], of_vector[1], [&]<class Pairs> {
    constexpr int64_t kChunk = 8 * CodeReader::kBytes / Pairs::kBits;
    for (int vector = 0; vector < 2; ++vector) {
      Pairs pairs(of_vector[vector]);
      CodeReader reader(of_vector[vector], kPackPrefetchBytes);
      BFloat16Pair* target = panel + vector * kLanes<float>;
      for_each_chunk<kChunk>(of_vector[vector], [&](int64_t d, int64_t block) MAXMOE_INLINE_LAMBDA {
        if (block >= 0) pairs.begin_block(block);
        const auto codes = reader.next<Pairs>();
        const auto store = [&]<int step>(__m512i values)
                               MAXMOE_INLINE_LAMBDA { _mm512_storeu_si512(target + step * kNR<float>, values); };
        if (depth.end - d >= kChunk) {
          for_each_step(pairs, codes, store);
        } else {
          for_each_step(pairs, codes, [&]<int step>(__m512i values) {
            if (2 * step >= depth.end - d) return;
            // The last step of an odd depth has one element.
            if (2 * step + 1 == depth.end - d) values = _mm512_and_si512(values, _mm512_set1_epi32(0xffff));
            store.template operator()<step>(values);
          });
        }
        target += kChunk / 2 * kNR<float>;
      });
    }
  });
}

// Whether micro-kernels can pack a block of B: its codes run across the inner dimension and fit a class of
// row_pairs.h.
MAXMOE_INLINE bool packs_pairs(const GemmOperand<BFloat16>& b, Range depth, Range columns) {
  const QuantizedMatrix& m = b.quantized;
  return !b.is_transposed && with_row_pairs(m, depth, [](const auto& /*pairs*/) {}) &&
         have_ordinary_scales(m, depth, columns);
}

// Packs whole panels of a block for which packs_pairs is true.
MAXMOE_INLINE void pack_pairs_row_major(const QuantizedMatrix& m, Range depth, Range columns, BFloat16Pair* panels) {
  with_row_pairs(m, depth, [&](auto& pairs) {
    for (int64_t column = columns.begin; column < columns.end; column += kNR<float>) {
      for (int64_t d = depth.begin; d < depth.end; d += 2, panels += kNR<float>) {
        const PairsX2 step = pairs.decode(d, depth.end, column);
        _mm512_storeu_si512(panels, step.first);
        _mm512_storeu_si512(panels + kLanes<float>, step.second);
      }
    }
  });
}

// micro_kernel_packing_b for codes: decoding them runs in parallel with the multiply-adds.
template <class Out>
void micro_kernel_packing_codes(const MicroTile<Out, BFloat16Pair>& tile, const QuantizedMatrix& m, Range depth,
                                int64_t column, BFloat16Pair* panel) {
  count_packed(depth.size() * kNR<float>);
  with_row_pairs(m, depth, [&](auto& pairs) {
    multiply_micro_tile<kMR>(tile, [&](int64_t k) -> StepX2<BFloat16Pair> {
      const PairsX2 step = pairs.decode(depth.begin + 2 * k, depth.end, column);
      _mm512_storeu_si512(panel + k * kNR<float>, step.first);
      _mm512_storeu_si512(panel + k * kNR<float> + kLanes<float>, step.second);
      return {std::bit_cast<Vector<BFloat16Pair>>(step.first), std::bit_cast<Vector<BFloat16Pair>>(step.second)};
    });
  });
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
