// Pairs are multiplied as they are decoded, and never stored. Each vector of columns is one chain of multiply-adds per
// row, and vdpbf16ps has a latency of 6 cycles: one row needs more vectors at a time than several rows.
#include "kernels/product/accumulators.simd.h"
#include "kernels/product/skinny/quantized.simd.h"
#include "kernels/product/tiled/pack_along_depth.simd.h"
#include "kernels/quantized/choose_decoder.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

#if MAXMOE_DECODES_PAIRS
namespace {

// Largest number of rows with four vectors of columns: the accumulators of more rows take the registers.
constexpr int kMaxRowsOfFourVectors = 2;

// The distance in bytes from quantized values to the ones that are prefetched meanwhile: of the next columns, or the
// first bytes of the next product.
MAXMOE_INLINE int64_t prefetch_distance(const VnniProduct& p, int64_t column, int64_t width) {
  const bool is_last = column + width >= p.codes.rows && p.next_codes.data != nullptr;
  return is_last
             ? reinterpret_cast<intptr_t>(p.next_codes.code(0, 0)) - reinterpret_cast<intptr_t>(p.codes.code(column, 0))
             : width * p.codes.row_bytes;
}

// Computes the sums of kVectors vectors of columns from `column` on.
template <ColumnDecoder Decoder, int kVectors, int kRows>
__attribute__((noinline)) void multiply_lines(const VnniProduct& p, const ForVectors<CodeColumns, kVectors>& columns,
                                              int64_t column) {
  constexpr int kDecoders = Decoder::kIsCommon ? 1 : kVectors;
  constexpr int kSteps = 16 / Decoder::kBits;  // in a word
  constexpr int64_t kPerLine = kCodesPerLine<Decoder::kBits>;
  constexpr int64_t kPerWord = kCodesPerWord<Decoder::kBits>;
  constexpr bool kDecodesAhead = kRows >= Decoder::kMinRowsAhead;
  const int64_t ahead = prefetch_distance(p, column, kVectors * kLanes<float>);
  auto decoders = for_vectors<Decoder, kDecoders>([&](int v) { return Decoder(columns.of[v]); });
  auto readers = for_vectors<LineReader, kVectors>([&](int v) { return LineReader(columns.of[v], ahead); });
  const SkinnyRows<BFloat16Pair, kRows> a{p.a};
  alignas(64) __m512i words[kVectors][16];
  float* const of_columns = p.sums.data + column;
  Accumulators<float, kRows, kVectors> sums(of_columns, p.sums.row_stride, p.accumulate);
  for_each_part<kPerLine>(columns.of[0].m, columns.of[0].depth, [&](Range part, int64_t block) MAXMOE_INLINE_LAMBDA {
    if (part.begin % kPerLine == 0) {
      for (int v = 0; v < kVectors; ++v) readers.of[v].next(words[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kDecoders && block >= 0; ++v) decoders.of[v].begin_block(block);
    const auto decode = [&](int v, int64_t d) MAXMOE_INLINE_LAMBDA {
      const int64_t word = d % kPerLine / kPerWord;
      readers.of[v].prefetch(word);
      return decoders.of[Decoder::kIsCommon ? 0 : v].decode(words[v][word]);
    };
    const auto multiply = [&](int v, int64_t d, int64_t num_steps, const auto& pairs) MAXMOE_INLINE_LAMBDA {
      SkinnyRows<BFloat16Pair, kRows> of_vector = a;
      // Otherwise the compiler keeps the elements of A in registers for the next vector of columns, and spills sums.
      if constexpr (kDecodesAhead) asm volatile("" : "+r"(of_vector.data));
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; ++step) {
        if (step >= num_steps) break;
        const auto of_step = std::bit_cast<Vector<BFloat16Pair>>(pairs(step));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums.of[r][v] = multiply_add(sums.of[r][v], of_vector(r, d / 2 + step), of_step);
        }
      }
    };
    int64_t d = part.begin;
    WordPairs<Decoder::kBits> previous;
    for (; d + kPerWord <= part.end; d += kPerWord) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const auto pairs = decode(v, d);
        if constexpr (!kDecodesAhead) {
          multiply(v, d, kSteps, pairs);
        } else if (v > 0) {
          multiply(v - 1, d, kSteps, previous);
        } else if (d > part.begin) {
          multiply(kVectors - 1, d - kPerWord, kSteps, previous);
        }
        previous = pairs;
      }
    }
    if (kDecodesAhead && d > part.begin) multiply(kVectors - 1, d - kPerWord, kSteps, previous);
    if (d == part.end) return;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) multiply(v, d, steps_of_depth<BFloat16Pair>(part.end - d), decode(v, d));
  });
  sums.store(of_columns, p.sums.row_stride);
}

// multiply_lines for at most kMaxRows rows. Returns the number of columns.
template <ColumnDecoder Decoder, int kMaxRows, int kVectors>
int64_t multiply_columns(const VnniProduct& p, const ForVectors<CodeColumns, kVectors>& columns, int64_t column) {
  with_number_of_rows(
      p.num_rows, [&]<int kRows> { multiply_lines<Decoder, kVectors, kRows>(p, columns, column); },
      std::make_integer_sequence<int, kMaxRows>());
  return kVectors * kLanes<float>;
}

}  // namespace

int64_t multiply_vnni(const VnniProduct& p, int64_t column) {
  const Range columns{column, p.codes.rows};
  const Range depth{0, p.codes.columns};
  int64_t num_columns = 0;
  if (p.num_rows <= kMaxRowsOfFourVectors && column + 2 * kLanesX2<float> <= p.sums.columns) {
    const auto four_vectors = vectors_of_panels<4>(p.codes, columns, depth);
    with_column_decoder(four_vectors, [&]<class Decoder> {
      if constexpr (Decoder::kTakesFourVectors) {
        num_columns = multiply_columns<Decoder, kMaxRowsOfFourVectors>(p, four_vectors, column);
      }
    });
    if (num_columns > 0) return num_columns;
  }
  const auto vectors = vectors_of_panels<2>(p.codes, columns, depth);
  with_column_decoder(
      vectors, [&]<class Decoder> { num_columns = multiply_columns<Decoder, kMaxVnniRows>(p, vectors, column); });
  return num_columns;
}
#endif

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
