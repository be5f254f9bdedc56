// Packing of quantized values as pairs of bfloat16.
#pragma once

#include "kernels/product/tiled/micro_kernel.simd.h"
#include "kernels/product/tiled/pack_along_depth.simd.h"
#include "kernels/quantized/choose_decoder.simd.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Prefetch distance of quantized values that are packed.
constexpr int64_t kPackPrefetchBytes = 4 * kCacheLineBytes;

// Stores the pairs of a word, of which the first `count` quantized values exist: steps are kNR pairs apart.
template <int kBits>
MAXMOE_INLINE void store_pairs(const WordPairs<kBits>& pairs, int64_t count, BFloat16Pair* target) {
#pragma GCC unroll 4
  for (int step = 0; step < 16 / kBits; ++step) {
    if (2 * step >= count) break;
    // The last step of an odd depth has one element.
    const __m512i exists = _mm512_set1_epi32(2 * step + 1 < count ? -1 : 0xffff);
    _mm512_storeu_si512(target + step * kNR<float>, _mm512_and_si512(pairs(step), exists));
  }
}

// Packs a vector of columns.
template <ColumnDecoder Decoder>
void pack_column_pairs(const CodeColumns& columns, BFloat16Pair* target) {
  constexpr int64_t kPerLine = kCodesPerLine<Decoder::kBits>;
  constexpr int64_t kPerWord = kCodesPerWord<Decoder::kBits>;
  Decoder decoder(columns);
  LineReader reader(columns, kPackPrefetchBytes);
  alignas(64) __m512i words[16];
  for_each_part<kPerLine>(columns.m, columns.depth, [&](Range part, int64_t block) MAXMOE_INLINE_LAMBDA {
    int64_t word = (part.begin - columns.depth.begin) % kPerLine / kPerWord;
    if (word == 0) reader.next(words);
    if (block >= 0) decoder.begin_block(block);
    const auto pack_word = [&](int64_t count) MAXMOE_INLINE_LAMBDA {
      reader.prefetch(word);
      store_pairs(decoder.decode(words[word++]), count, target);
      target += kPerWord / 2 * kNR<float>;
    };
    int64_t left = part.size();
    for (; left >= kPerWord; left -= kPerWord) pack_word(kPerWord);
    if (left > 0) pack_word(left);
  });
}

// Packs both vectors of a panel, one after the other: the tables of INT4 for both do not fit into the registers.
template <ColumnDecoder Decoder>
MAXMOE_INLINE void pack_columns(const ForVectors<CodeColumns, 2>& columns, BFloat16Pair* panel) {
  pack_column_pairs<Decoder>(columns.of[0], panel);
  pack_column_pairs<Decoder>(columns.of[1], panel + kLanes<float>);
}

// Packs a vector of columns word by word. Between words the caller runs parts of the transpose of the next line.
template <ColumnDecoder Decoder>
class ColumnsPackedByWord {
 public:
  explicit ColumnsPackedByWord(const CodeColumns& columns) : decoder_(columns), reader_(columns, kPackPrefetchBytes) {
    for (int64_t part = 0; part < kNumParts; ++part) transpose_part(part);
  }

  // Parts of the transpose of the next line, in order.
  static constexpr int64_t kNumParts = 8;
  MAXMOE_INLINE void transpose_part(int64_t part) {
    __m512i* const next = words_[1 - current_];
    if (part < 4) {
      reader_.first_stage(part, next);
    } else {
      reader_.second_stage(part - 4, next);
    }
  }
  // Makes the transposed line the current one.
  MAXMOE_INLINE void begin_line() {
    current_ = 1 - current_;
    reader_.advance();
  }
  MAXMOE_INLINE void begin_block(int64_t index) { decoder_.begin_block(index); }
  MAXMOE_INLINE void pack_word(int64_t word, int64_t count, BFloat16Pair* target) const {
    reader_.prefetch(word);
    store_pairs(decoder_.decode(words_[current_][word]), count, target);
  }

 private:
  Decoder decoder_;
  LineReader reader_;
  int64_t current_ = 1;
  alignas(64) __m512i words_[2][16];
};

// Packs both vectors of a panel, word by word. body(begin, end) is called for the steps of each word, after the next
// word is packed.
template <ColumnDecoder Decoder, class Body>
MAXMOE_INLINE void pack_columns_by_word(const ForVectors<CodeColumns, 2>& columns, BFloat16Pair* panel,
                                        const Body& body) {
  const CodeColumns& first = columns.of[0];
  constexpr int64_t kPerLine = kCodesPerLine<Decoder::kBits>;
  constexpr int64_t kPerWord = kCodesPerWord<Decoder::kBits>;
  constexpr int64_t kSteps = kPerWord / 2;
  ColumnsPackedByWord<Decoder> vectors[] = {ColumnsPackedByWord<Decoder>(first),
                                            ColumnsPackedByWord<Decoder>(columns.of[1])};
  const auto pack_word = [&](int64_t d, int64_t count) MAXMOE_INLINE_LAMBDA {
    const int64_t step = d / 2;
    const int64_t word = d % kPerLine / kPerWord;
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) vectors[v].pack_word(word, count, panel + step * kNR<float> + v * kLanes<float>);
    // A line has 16 words, and two vectors 8 parts each.
    vectors[word % 2].transpose_part(word / 2);
    if (step > 0) body(step - kSteps, step);
  };
  for_each_part<kPerLine>(first.m, first.depth, [&](Range part, int64_t block) MAXMOE_INLINE_LAMBDA {
    int64_t d = part.begin - first.depth.begin;
    const int64_t end = part.end - first.depth.begin;
    for (ColumnsPackedByWord<Decoder>& vector : vectors) {
      if (d % kPerLine == 0) vector.begin_line();
      if (block >= 0) vector.begin_block(block);
    }
    for (; d + kPerWord <= end; d += kPerWord) pack_word(d, kPerWord);
    if (d < end) pack_word(d, end - d);
  });
  const int64_t num_steps = steps_of_depth<BFloat16Pair>(first.depth.size());
  if (num_steps > 0) body((num_steps - 1) / kSteps * kSteps, num_steps);
}

// Packs a panel of a B whose quantized values run along the inner dimension. Returns false if no
// decoder fits.
MAXMOE_INLINE bool pack_pairs_along_depth(const QuantizedMatrix& m, Range columns, Range depth, BFloat16Pair* panel) {
  const auto vectors = vectors_of_panels<2>(m, columns, depth);
  return with_column_decoder(vectors, [&]<class Decoder> { pack_columns<Decoder>(vectors, panel); });
}

// micro_kernel_packing_b for quantized values along the inner dimension: the next word is packed before a word is
// multiplied, so that both run in parallel. A panel of ColumnTables is packed first, because the registers do not hold
// its tables and the sums. Returns false, and does nothing, if no decoder fits.
template <class Out>
bool micro_kernel_packing_columns(const MicroTile<Out, BFloat16Pair>& tile, const QuantizedMatrix& m, Range depth,
                                  int64_t column, BFloat16Pair* panel) {
  const auto vectors = vectors_of_panels<2>(m, {column, column + kNR<float>}, depth);
  return with_column_decoder(vectors, [&]<class Decoder> {
    if constexpr (std::is_same_v<Decoder, ColumnTables>) {
      pack_columns<Decoder>(vectors, panel);
      multiply_packed<kMR>(tile, panel);
    } else {
      TilePrefetch prefetch(tile);
      with_sums_of_micro_tile<kMR>(tile, [&](const auto& multiply_step) MAXMOE_INLINE_LAMBDA {
        pack_columns_by_word<Decoder>(vectors, panel, [&](int64_t begin, int64_t end) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 4
          for (int64_t i = 0; i < 16 / Decoder::kBits; ++i) {
            if (begin + i >= end) break;
            prefetch.advance();
            multiply_step(begin + i, load_packed_step(panel, begin + i));
          }
        });
      });
      tile.next = prefetch.rest();
    }
  });
}

// Whether quantized values of B run across the inner dimension and fit a decoder: micro-kernels can pack it then.
MAXMOE_INLINE bool packs_pairs(const GemmOperand<BFloat16>& b) {
  return !b.is_transposed && b.quantized.has_ordinary_scales && with_row_decoder(b.quantized, []<class Pairs> {});
}

// Packs whole panels of a B for which packs_pairs is true.
MAXMOE_INLINE void pack_pairs_row_major(const QuantizedMatrix& m, Range depth, Range columns, BFloat16Pair* panels) {
  with_row_decoder(m, [&]<class Pairs> {
    for (int64_t column = columns.begin; column < columns.end; column += kNR<float>) {
      Pairs pairs(m, depth, column);
      for (int64_t d = depth.begin; d < depth.end; d += 2, panels += kNR<float>) {
        const PairsX2 step = pairs.decode();
        _mm512_storeu_si512(panels, step.first);
        _mm512_storeu_si512(panels + kLanes<float>, step.second);
      }
    }
  });
}

// micro_kernel_packing_b for quantized values across the inner dimension: decoding them runs in parallel with the
// multiply-adds.
template <class Out>
bool micro_kernel_packing_rows(const MicroTile<Out, BFloat16Pair>& tile, const QuantizedMatrix& m, Range depth,
                               int64_t column, BFloat16Pair* panel) {
  return with_row_decoder(m, [&]<class Pairs> {
    Pairs pairs(m, depth, column);
    multiply_micro_tile<kMR>(tile, [&](int64_t k) MAXMOE_INLINE_LAMBDA -> StepX2<BFloat16Pair> {
      const PairsX2 step = pairs.decode();
      _mm512_storeu_si512(panel + k * kNR<float>, step.first);
      _mm512_storeu_si512(panel + k * kNR<float> + kLanes<float>, step.second);
      return {std::bit_cast<Vector<BFloat16Pair>>(step.first), std::bit_cast<Vector<BFloat16Pair>>(step.second)};
    });
  });
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
