// Chooses a decoder of pairs for the columns or rows of a matrix.
#pragma once

#include "kernels/quantized/formats.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Whether a decoder fits all vectors of columns, and their number.
template <ColumnDecoder Decoder, int kVectors>
MAXMOE_INLINE bool fits_all(const ForVectors<CodeColumns, kVectors>& columns) {
  if (kVectors > 2 && !Decoder::kTakesFourVectors) return false;
  const auto scale_of = [](const CodeColumns& c) { return c.m.scale_index(c.rows[0], 0); };
  for (const CodeColumns& c : columns.of) {
    if (!Decoder::fits(c) || (Decoder::kIsCommon && scale_of(c) != scale_of(columns.of[0]))) return false;
  }
  return true;
}

template <int kVectors, class Body>
MAXMOE_INLINE bool with_column_decoder(const ForVectors<CodeColumns, kVectors>& columns, const Body& body) {
  bool is_found = false;
  Formats::with(columns.of[0].m.codes, [&]<class Format> {
    const auto fits = [&]<class Decoder> { return fits_all<Decoder>(columns); };
    is_found = DecodersOf<Format>::Columns::with_first(fits, body);
  });
  return is_found;
}

// All scales of m must be ordinary.
template <class Body>
MAXMOE_INLINE bool with_row_decoder(const QuantizedMatrix& m, const Body& body) {
  bool is_found = false;
  if (int64_t{1} << m.log2_columns_per_scale < kMinColumnsPerScale) return false;
  Formats::with(m.codes, [&]<class Format> {
    is_found = DecodersOf<Format>::Rows::with_first([&]<class Decoder> { return Decoder::fits(m); }, body);
  });
  return is_found;
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
