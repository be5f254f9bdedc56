// The decoders that a format has: DecodersOf, and their contracts. Without a specialization these are decoders of any
// 16 values.
//
//   Columns    of pairs of bfloat16, along the inner dimension      the first one that fits, with AVX512-BF16
//   Rows       of pairs of bfloat16, across the inner dimension     the same
//   ForWords   of floats along the inner dimension, for skinny products (words.simd.h), with AVX2
//   Runs<T>    of rows to T, for everything else (decode_rows.simd.cpp), with AVX2
//
// AVX512-BF16 treats subnormal numbers as zero. Where no decoder has the bits of the definition, rows are decoded by
// decode_rows, as they are on all other processors.
#pragma once

#include <concepts>

#include "kernels/quantized/column_tables.simd.h"
#include "kernels/quantized/decoded_halves.simd.h"
#include "kernels/quantized/row_decoders.simd.h"
#include "kernels/quantized/scaled_bytes.simd.h"
#include "kernels/quantized/words.simd.h"

#if defined(__AVX2__)

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

#if MAXMOE_DECODES_PAIRS

// Decodes a vector of columns whose quantized values run along the inner dimension, word by word (lines.simd.h).
template <class Decoder>
concept ColumnDecoder = requires(Decoder decoder, const Decoder& begun, const CodeColumns& columns, __m512i words) {
  // Whether it has the bits of the definition for these columns.
  { Decoder::fits(columns) } -> std::same_as<bool>;
  // Bits of a code.
  { Decoder::kBits } -> std::same_as<const int&>;
  // Whether one object decodes all vectors of a panel: they must have the same scales.
  { Decoder::kIsCommon } -> std::same_as<const bool&>;
  // Number of rows of a skinny product from which on the next word is decoded before a word is multiplied. With fewer
  // rows this makes no difference, or is slower.
  { Decoder::kMinRowsAhead } -> std::same_as<const int&>;
  // Whether a product of one or two rows is faster with four vectors of columns at a time than with two.
  { Decoder::kTakesFourVectors } -> std::same_as<const bool&>;
  requires std::constructible_from<Decoder, const CodeColumns&>;
  // Reads the scales of a block of the inner dimension. Blocks come in order.
  { decoder.begin_block(int64_t{}) } -> std::same_as<void>;
  // The pairs of a word.
  { begun.decode(words) } -> std::same_as<WordPairs<Decoder::kBits>>;
};

// Decodes NR columns whose quantized values run across the inner dimension, two rows in each step. `decode` is called
// between the multiply-adds of a micro-kernel: it has no branch that depends on data.
template <class Decoder>
concept RowDecoder = requires(Decoder decoder, const QuantizedMatrix& m, Range depth, int64_t column) {
  { Decoder::fits(m) } -> std::same_as<bool>;
  Decoder(m, depth, column);
  { decoder.decode() } -> std::same_as<PairsX2>;
};

// A list of decoders, of which the first one that fits is taken.
template <class... Decoder>
struct Decoders {
  // Calls body.operator()<Decoder>() with the first decoder for which fits.operator()<Decoder>() is true. Returns false
  // if there is none.
  template <class Fits, class Body>
  static MAXMOE_INLINE bool with_first(const Fits& fits, const Body& body) {
    [[maybe_unused]] const auto try_decoder = [&]<class D> {  // unused in an empty list
      if (!fits.template operator()<D>()) return false;
      body.template operator()<D>();
      return true;
    };
    return (try_decoder.template operator()<Decoder>() || ...);
  }
};

template <ColumnDecoder... Decoder>
using ColumnDecoders = Decoders<Decoder...>;
template <RowDecoder... Decoder>
using RowDecoders = Decoders<Decoder...>;

// A decoder of rows for each type of scales.
template <bool kIsHighFirst, class Scales>
struct TableRowDecoders;
template <bool kIsHighFirst, ScaleType... kType>
struct TableRowDecoders<kIsHighFirst, ScaleTypes<kType...>> : RowDecoders<TableRowPairs<kType, kIsHighFirst>...> {};

// The same, which are tried after decoders `First`.
template <class Floats, class Scales, class... First>
struct ByteRowDecoders;
template <class Floats, ScaleType... kType, class... First>
struct ByteRowDecoders<Floats, ScaleTypes<kType...>, First...> : RowDecoders<First..., ByteRowPairs<Floats, kType>...> {
};

#endif

// Decodes runs of codes to T, after construction with a QuantizedMatrix.
template <class Decoder, class T>
concept RunDecoder = std::constructible_from<Decoder, const QuantizedMatrix&> &&
                     requires(const Decoder& decoder, const Run& run, T* out) {
                       // Decodes the first codes of a run. Returns their number.
                       { decoder.decode(run, out) } -> std::same_as<int64_t>;
                     };

// Decoders of 16 values.
template <class Format>
struct TableDecoders {
#if MAXMOE_DECODES_PAIRS
  using Columns = ColumnDecoders<ColumnTables>;
  using Rows = TableRowDecoders<Format::kCodes.is_high_first, typename Format::Scales>;
#endif
  using ForWords = TableWords<Format>;
  template <class T>
  using Runs = TableRuns<Format, T>;
};

// The decoders of a format. A format specializes it in its file.
template <class Format>
struct DecodersOf : TableDecoders<Format> {};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
