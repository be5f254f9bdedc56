// A cache line of quantized values of each of the NR columns of a panel is transposed in words of 32 bits, so that a
// lane holds neighbouring quantized values of its column. The quantized values of a word are decoded one after the
// other, scaled, rounded to the type of the product and multiplied. Decoded numbers are not stored: with blocks of
// decoded numbers instead 1 row took 1.3 to 3.9 times the time, 4 rows 1.1 to 2.9 (docs/concepts/kernels.md).
//
// Both vectors of columns of a panel are decoded and multiplied in turn, because the sums of one vector are a chain of
// multiply-adds whose latency is longer than decoding takes. Both use the same loads of A.
#include "kernels/product/skinny/quantized.simd.h"
#include "kernels/product/skinny/transposed_parts.simd.h"
#include "kernels/product/tiled/blocking.simd.h"
#include "kernels/quantized/formats.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

#if defined(__AVX2__)

constexpr int kVectors = 2;  // vectors per panel

// Whether a decoder is used in products of type T. Products of bfloat16 pairs are in vnni.simd.cpp.
template <class T, class Decoder>
constexpr bool kMultipliesFloats = std::is_same_v<ElementOf<T>, float> && Decoder::template kMultiplies<T>;

// The quantized values and scales of a panel of columns. Columns past the end repeat the last column.
template <class T>
struct PanelOfWords {
  WordReader readers[kVectors];
  LaneScales scales[kVectors];

  MAXMOE_INLINE PanelOfWords(const QuantizedMatrix& m, int64_t column)
      : readers{{m, row_of_lane(m, column, 0)}, {m, row_of_lane(m, column, 1)}},
        scales{{m, row_of_lane(m, column, 0)}, {m, row_of_lane(m, column, 1)}} {}

 private:
  static MAXMOE_INLINE auto row_of_lane(const QuantizedMatrix& m, int64_t column, int vector) {
    return [&m, column, vector](int lane) { return at_most(column + column_of_lane<T>(vector, lane), m.rows - 1); };
  }
};

// The bytes of quantized values from column `first` of B on. The columns of B are rows in memory.
MAXMOE_INLINE ConstMatrixView<uint8_t> bytes_of_columns(const QuantizedMatrix& m, int64_t first) {
  return {m.code(first, 0), m.rows - first, m.bytes_of(m.columns), m.row_bytes};
}

// The scales and zero points of a block of the inner dimension. It also records whether the decoder is exact for all
// quantized values and scales so far.
template <class Decoder>
struct BlockScales {
  Floats scale[kVectors] = {};
  Floats zero[kVectors] = {};
  Words inexact = {};  // a lane is not zero if its column is not decoded exactly

  template <class T>
  MAXMOE_INLINE void read(const PanelOfWords<T>& panel, int64_t block) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      scale[v] = panel.scales[v].scales(block);
      if constexpr (Decoder::kHasZeros) zero[v] = panel.scales[v].zeros(block, Decoder::kZero);
      if constexpr (!Decoder::kIsAlwaysExact) {
        inexact |= Decoder::inexact_scales(scale[v]);
        scale[v] *= Decoder::kScale;
      }
    }
  }

  MAXMOE_INLINE void check_codes(const Words (&words)[WordReader::kWords]) {
    if constexpr (!Decoder::kIsAlwaysExact) {
      for (const Words& of_columns : words) inexact |= Decoder::inexact_codes(of_columns);
    }
  }

  MAXMOE_INLINE bool is_exact() const {
    uint32_t any = 0;
    for (int lane = 0; lane < kLanes<float>; ++lane) any |= inexact[lane];
    return any == 0;
  }
};

template <class T, class Decoder, int kRows>
__attribute__((noinline)) bool multiply_words(const FloatProduct& p, int64_t column) {
  constexpr int64_t kPerWord = Decoder::kCodesPerWord;
  constexpr int64_t kPerLine = WordReader::kWords * kPerWord;
  const QuantizedMatrix& m = p.codes;
  const SkinnyRows<float, kRows> a{p.a};
  const MatrixView<float> out = p.sums.column_range(column, column + kNR<float>);
  const PanelOfWords<T> panel(m, column);
  const Decoder decoder;
  ColumnPrefetch prefetch(
      columns_to_prefetch(bytes_of_columns(m, column + kNR<float>), bytes_of_columns(p.next_codes, 0)));
  BlockScales<Decoder> scales;
  Accumulators<float, kRows, kVectors> sums(out.data, out.row_stride, p.accumulate);
  Words words[kVectors][WordReader::kWords];

  // Decodes and multiplies the first `count` quantized values of a word, from depth d on.
  const auto multiply = [&](int64_t word, int64_t d, int64_t count) MAXMOE_INLINE_LAMBDA {
    Words decoded[kVectors][Decoder::kDecoded];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) decoder.begin(words[v][word], decoded[v]);
#pragma GCC unroll 8
    for (int i = 0; i < kPerWord; ++i) {
      if (i >= count) break;
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) {
        Floats values = decoder.value(decoded[v], i);
        if constexpr (Decoder::kHasZeros) values -= scales.zero[v];
        values *= scales.scale[v];
        if constexpr (Decoder::template kIsRounded<T>) values = rounded<T>(values);
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) sums.of[r][v] = multiply_add(sums.of[r][v], a(r, d + i), values);
      }
    }
  };

  for_each_part<kPerLine>(m, {0, m.columns}, [&](Range part, int64_t block) MAXMOE_INLINE_LAMBDA {
    const int64_t of_line = part.begin % kPerLine;
    for (int v = 0; v < kVectors && of_line == 0; ++v) {
      panel.readers[v].read(m.bytes_of(part.begin), words[v]);
      scales.check_codes(words[v]);
    }
    if (block >= 0) scales.read(panel, block);
    int64_t word = of_line / kPerWord;
    int64_t d = part.begin;
    for (; d + kPerWord <= part.end; d += kPerWord, ++word) {
      prefetch.advance<1>();
      multiply(word, d, kPerWord);
    }
    if (d < part.end) multiply(word, d, part.end - d);
  });
  if (!scales.is_exact()) return false;
  sums.store(out.data, out.row_stride);
  return true;
}

#endif

}  // namespace

template <class T>
bool multiplies_words([[maybe_unused]] const QuantizedMatrix& m) {
  bool result = false;
#if defined(__AVX2__)
  // Words are read from the first code on. With this alignment every part with one scale begins with a word.
  if (m.first_column % kMinColumnsPerScale != 0) return false;
  Formats::with(m.codes, [&]<class Format> {
    using Decoder = DecodersOf<Format>::ForWords;
    result = kMultipliesFloats<T, Decoder> && Decoder::fits();
  });
#endif
  return result;
}

template <class T>
bool multiply_words_of_panel([[maybe_unused]] const FloatProduct& p, [[maybe_unused]] int64_t column) {
  bool is_done = false;
#if defined(__AVX2__)
  Formats::with(p.codes.codes, [&]<class Format> {
    using Decoder = DecodersOf<Format>::ForWords;
    if constexpr (kMultipliesFloats<T, Decoder>) {
      with_number_of_rows(
          p.num_rows, [&]<int kRows> { is_done = multiply_words<T, Decoder, kRows>(p, column); },
          std::make_integer_sequence<int, kMaxRowsOfWords>());
    }
  });
#endif
  return is_done;
}

#define MAXMOE_INSTANTIATE_FOR(T)                            \
  template bool multiplies_words<T>(const QuantizedMatrix&); \
  template bool multiply_words_of_panel<T>(const FloatProduct&, int64_t);

MAXMOE_INSTANTIATE_FOR(float)
MAXMOE_INSTANTIATE_FOR(BFloat16)
MAXMOE_INSTANTIATE_FOR(Float16)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
