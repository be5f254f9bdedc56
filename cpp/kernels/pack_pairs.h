// Packing of codes as pairs of bfloat16. Only for the .cpp files that are compiled per instruction set.
#pragma once

#include "column_tables.h"
#include "e2m1_codes.h"
#include "row_pairs.h"
#include "scaled_bytes.h"

#if defined(MAXMOE_DECODES_PAIRS)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Prefetch distance of codes that are packed.
constexpr int64_t kPackPrefetchBytes = 4 * kCacheLineBytes;

// Packs a vector of columns, with the decoders of multiply_lines.h.
template <class Decoder>
void pack_column_pairs(const CodeColumns& columns, BFloat16Pair* target) {
  constexpr int kSteps = 16 / Decoder::kBits;  // in a word
  constexpr int64_t kPerLine = kCodesPerLine<Decoder::kBits>;
  constexpr int64_t kPerWord = kCodesPerWord<Decoder::kBits>;
  Decoder decoder(columns);
  LineReader reader(columns, kPackPrefetchBytes);
  alignas(64) __m512i words[16];
  for_each_part<kPerLine>(columns.m, columns.depth, [&](Range part, int64_t block) MAXMOE_INLINE_LAMBDA {
    int64_t word = (part.begin - columns.depth.begin) % kPerLine / kPerWord;
    if (word == 0) reader.next(words);
    if (block >= 0) decoder.begin_block(block);
    const auto store = [&](int64_t left, auto is_whole) MAXMOE_INLINE_LAMBDA {
      reader.prefetch(word);
      const auto values = decoder.decode(words[word++]);
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; ++step) {
        __m512i pairs = values(step);
        if constexpr (!is_whole) {
          if (left <= 2 * step) break;
          // The last step of an odd depth has one element.
          if (left == 2 * step + 1) pairs = _mm512_and_si512(pairs, _mm512_set1_epi32(0xffff));
        }
        _mm512_storeu_si512(target, pairs);
        target += kNR<float>;
      }
    };
    int64_t left = part.size();
    for (; left >= kPerWord; left -= kPerWord) store(left, std::true_type());
    if (left > 0) store(left, std::false_type());
  });
}

// Packs a panel of a B whose codes run along the inner dimension. Returns false if the codes fit no decoder.
MAXMOE_INLINE bool pack_pairs_along_depth(const QuantizedMatrix& m, Range columns, Range depth, BFloat16Pair* panel) {
  const CodeColumns first = code_columns(m, columns, depth, 0);
  const CodeColumns second = code_columns(m, columns, depth, 1);
  const auto try_decoder = [&]<class Decoder>(const auto& fits) {
    if (!fits(first) || !fits(second)) return false;
    pack_column_pairs<Decoder>(first, panel);
    pack_column_pairs<Decoder>(second, panel + kLanes<float>);
    return true;
  };
  const auto try_each = [&]<class... Decoder> {
    return (try_decoder.template operator()<Decoder>(Decoder::fits) || ...);
  };
  const auto has_common_scales = [&](const CodeColumns& c) { return ScaledE4M3Table::fits(c, first); };
  return try_each.template operator()<ScaledE2M1, ColumnTables>() ||
         try_decoder.template operator()<ScaledE4M3Table>(has_common_scales) ||
         try_each.template operator()<ScaledE4M3, ScaledInt8>();
}

// Whether codes of B run across the inner dimension and fit a class of row_pairs.h: micro-kernels can pack it then.
MAXMOE_INLINE bool packs_pairs(const GemmOperand<BFloat16>& b) {
  return !b.is_transposed && b.quantized.has_ordinary_scales && with_row_pairs(b.quantized, []<class Pairs> {});
}

// Packs whole panels of a B for which packs_pairs is true.
MAXMOE_INLINE void pack_pairs_row_major(const QuantizedMatrix& m, Range depth, Range columns, BFloat16Pair* panels) {
  with_row_pairs(m, [&]<class Pairs> {
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

// micro_kernel_packing_b for codes: decoding them runs in parallel with the multiply-adds.
template <class Out>
void micro_kernel_packing_codes(const MicroTile<Out, BFloat16Pair>& tile, const QuantizedMatrix& m, Range depth,
                                int64_t column, BFloat16Pair* panel) {
  count_packed(depth.size() * kNR<float>);
  with_row_pairs(m, [&]<class Pairs> {
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
