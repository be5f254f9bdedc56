// The contract of a decoder of pairs, and the table that chooses one by format and direction.
//
//                 along the inner dimension            across it                     without pairs of bfloat16
//   MXFP4         ScaledE2M1                           E2M1RowPairs                  decode_rows.simd.cpp, for both
//   NF4, INT4     ColumnTables                         TableRowPairs                 directions; along the inner
//   FP8           ScaledE4M3Table for common scales,   E4M3RowPairs for common       dimension words.simd.h for skinny
//                 ScaledE4M3                           scales, ByteRowPairs          products
//   INT8          ScaledInt8                           ByteRowPairs
//
// AVX512-BF16 treats subnormal numbers as zero. Where no decoder has the bits of the definition, rows are decoded by
// decode_rows, as they are on all other processors.
#pragma once

#include <concepts>

#include "kernels/quantized/column_tables.simd.h"
#include "kernels/quantized/e2m1.simd.h"
#include "kernels/quantized/row_decoders.simd.h"
#include "kernels/quantized/scaled_bytes.simd.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

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
    const auto try_decoder = [&]<class D> {
      if (!fits.template operator()<D>()) return false;
      body.template operator()<D>();
      return true;
    };
    return (try_decoder.template operator()<Decoder>() || ...);
  }
};

template <ColumnDecoder... Decoder>
using ColumnDecodersOf = Decoders<Decoder...>;
template <RowDecoder... Decoder>
using RowDecodersOf = Decoders<Decoder...>;

using ColumnDecoders = ColumnDecodersOf<ScaledE2M1, ColumnTables, ScaledE4M3Table, ScaledE4M3, ScaledInt8>;
template <ScaleType... kType>
using RowDecodersWith =
    RowDecodersOf<E2M1RowPairs, E4M3RowPairs, TableRowPairs<kType, false>..., TableRowPairs<kType, true>...,
                  ByteRowPairs<Codes::e4m3, kType>..., ByteRowPairs<Codes::int8, kType>...>;
using RowDecoders = RowDecodersWith<ScaleType::float32, ScaleType::bfloat16, ScaleType::float16, ScaleType::e8m0>;

// Whether a decoder fits all vectors of columns.
template <ColumnDecoder Decoder, int kVectors>
MAXMOE_INLINE bool fits_all(const ForVectors<CodeColumns, kVectors>& columns) {
  const auto scale_of = [](const CodeColumns& c) { return c.m.scale_index(c.rows[0], 0); };
  for (const CodeColumns& c : columns.of) {
    if (!Decoder::fits(c) || (Decoder::kIsCommon && scale_of(c) != scale_of(columns.of[0]))) return false;
  }
  return true;
}

template <int kVectors, class Body>
MAXMOE_INLINE bool with_column_decoder(const ForVectors<CodeColumns, kVectors>& columns, const Body& body) {
  return ColumnDecoders::with_first([&]<class Decoder> { return fits_all<Decoder>(columns); }, body);
}

// All scales of m must be ordinary.
template <class Body>
MAXMOE_INLINE bool with_row_decoder(const QuantizedMatrix& m, const Body& body) {
  return RowDecoders::with_first([&]<class Decoder> { return Decoder::fits(m); }, body);
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
