// Packing of a quantized B: its codes are decoded while a micro-panel is packed. Both orientations read the same codes.
//
// If the rows of codes run along the inner dimension, as in the forward pass with published weights, the columns of a
// vector are in different rows. Codes are transposed before they are decoded, in words of 32 bits, which hold 8 or 4
// codes: a decoded vector is then a step of a micro-panel, and its lanes have the scales of their columns.
//
// If the rows run across the inner dimension, as for gradients of the input, a decoded vector is a part of a row.
#include "pack_quantized.h"

#include "blocking.h"
#include "decode.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The largest number of scales of a column in a block of B.
constexpr int64_t kMaxScalesOfColumn = kKCSteps * 2 / kMinColumnsPerScale;

// The scales and zero points of the columns of a vector, which are rows of codes, for a range of the inner dimension.
class ColumnScales {
 public:
  static constexpr int kColumns = kLanes<float>;

  // Column i is row rows.begin + row_of(i) of `m`; rows past the end have the scale 0.
  template <class RowOf>
  MAXMOE_INLINE ColumnScales(const QuantizedMatrix& m, Range rows, Range depth, const RowOf& row_of)
      : log2_(m.log2_columns_per_scale), first_(block_of(m, depth.begin)), has_zeros_(m.zeros != nullptr) {
    const int64_t count = block_of(m, depth.end - 1) - first_ + 1;
    for (int i = 0; i < kColumns; ++i) {
      const int64_t row = rows.begin + row_of(i);
      const bool exists = row < rows.end;
      const int64_t index = m.scale_index(exists ? row : 0, depth.begin);
      for (int64_t block = 0; block < count; ++block) {
        scales_[block * kColumns + i] = exists ? m.scale(index + block) : 0.0F;
        if (has_zeros_) zeros_[block * kColumns + i] = m.zero(index + block);
      }
    }
    offset_ = m.first_column;
  }

  // (value - zero) * scale for values at depth d.
  MAXMOE_INLINE Vector<float> scaled(Vector<float> values, int64_t d) const {
    const int64_t block = ((offset_ + d) >> log2_) - first_;
    if (has_zeros_) values -= load_vector(zeros_ + block * kColumns);
    return values * load_vector(scales_ + block * kColumns);
  }

 private:
  static MAXMOE_INLINE int64_t block_of(const QuantizedMatrix& m, int64_t d) {
    return (m.first_column + d) >> m.log2_columns_per_scale;
  }

  int log2_;
  int64_t first_;
  int64_t offset_ = 0;
  bool has_zeros_;
  float scales_[(kMaxScalesOfColumn + 1) * kColumns];
  float zeros_[(kMaxScalesOfColumn + 1) * kColumns];
};

// 16 bytes of each of kLanes<float> rows, transposed: lane i of word w is word w of row i.
constexpr int64_t kCodeWordBytes = 16;

MAXMOE_INLINE void load_words(const uint8_t* const (&rows)[kLanes<float>], Vector<uint32_t> (&words)[4]) {
  constexpr int kBlocks = kVectorBytes / 16;
  for (int r = 0; r < 4; ++r) {
    // Block b of a vector is of row 4 b + r, so that the lanes of the transposed words are in the order of the rows.
    uint8_t bytes[kVectorBytes];
    for (int b = 0; b < kBlocks; ++b) std::memcpy(bytes + kCodeWordBytes * b, rows[4 * b + r], kCodeWordBytes);
    std::memcpy(&words[r], bytes, sizeof(bytes));
  }
  transpose_within_blocks<uint32_t>(words);
}

// The words of `count` codes of each row, at most those of 16 bytes.
MAXMOE_INLINE void load_codes(const QuantizedMatrix& m, const uint8_t* const (&rows)[kLanes<float>], int64_t count,
                              bool swaps_halves, Vector<uint32_t> (&words)[4]) {
  constexpr int kCount = kLanes<float>;
  if (m.bytes_of(count) < kCodeWordBytes) {  // whole words could end past the last row
    uint8_t part[kCount][kCodeWordBytes] = {};
    const uint8_t* parts[kCount];
    for (int i = 0; i < kCount; ++i) {
      copy_row(rows[i], part[i], m.bytes_of(count));
      parts[i] = part[i];
    }
    load_words(parts, words);
  } else {
    load_words(rows, words);
  }
  if (!swaps_halves) return;
  for (Vector<uint32_t>& word : words) word = (word & 0x0f0f0f0fU) << 4 | ((word >> 4) & 0x0f0f0f0fU);
}

// Stores value(i) of the first `count` elements of 16 bytes of codes as steps of a panel.
template <class Element, class T, int kChunk, class Value>
MAXMOE_INLINE void store_steps(Element* target, int64_t count, const Value& value) {
  constexpr int kElements = kDepthPerStep<Element>;
  const auto store = [&](int i) MAXMOE_INLINE_LAMBDA {
    Element* const step = target + i / kElements * kNR<float>;
    if constexpr (std::is_same_v<Element, BFloat16Pair>) {
      const Vector<uint32_t> low = round_to_bfloat16(value(i)) >> 16;
      const auto high = i + 1 < count ? round_to_bfloat16(value(i + 1)) & 0xffff0000U : Vector<uint32_t>{};
      store_vector<Element>(step, low | high);
    } else {
      store_vector<Element>(step, rounded<T>(value(i)));
    }
  };
  if (count == kChunk) {
    // Unrolled completely: 32 is the largest number of elements in 16 bytes.
#pragma GCC unroll 32
    for (int i = 0; i < kChunk; i += kElements) store(i);
  } else {
    for (int i = 0; i < count; i += kElements) store(i);
  }
}

// Packs columns of B whose codes run along the inner dimension: columns [columns.begin, + NR) are rows of `m`. Columns
// past the end are finite.
template <class Element, class T, class Decoder>
void pack_panel_along_depth(const QuantizedMatrix& m, const Decoder& decoder, Range columns, Range depth,
                            Element* panel) {
  constexpr int kCount = kLanes<float>;
  constexpr int kPerWord = 32 / Decoder::kBits;
  constexpr int kChunk = 4 * kPerWord;  // elements of the inner dimension in 16 bytes
  const bool swaps_halves = is_high_first(m.codes);
#pragma GCC unroll 2
  for (int vector = 0; vector < 2; ++vector) {
    const auto row_of = [vector](int lane) { return column_of_lane<T>(vector, lane); };
    const ColumnScales scales(m, columns, depth, row_of);
    const uint8_t* rows[kCount];
    for (int i = 0; i < kCount; ++i) {
      rows[i] = m.code(at_most(columns.begin + row_of(i), columns.end - 1), depth.begin);
    }
    for (int64_t d = depth.begin; d < depth.end; d += kChunk) {
      const int64_t count = at_most(depth.end - d, kChunk);
      Vector<uint32_t> words[4];
      load_codes(m, rows, count, swaps_halves, words);
      Element* const target = panel + (d - depth.begin) / kDepthPerStep<Element> * kNR<float> + vector * kCount;
      store_steps<Element, T, kChunk>(target, count, [&](int i) MAXMOE_INLINE_LAMBDA {
        return scales.scaled(decoder(words[i / kPerWord] >> (Decoder::kBits * (i % kPerWord))), d);
      });
      for (const uint8_t*& row : rows) row += kCodeWordBytes;
    }
  }
}

// One step of a B whose codes run across the inner dimension: NR columns of row d, or of the pair d and d + 1.
template <class Element, class T, class Decoder>
MAXMOE_INLINE StepX2<Element> decode_step(const QuantizedMatrix& m, const Decoder& decoder, int64_t d, Range depth,
                                          int64_t column) {
  const VectorX2<float> upper = decode_x2<T>(m, decoder, d, column);
  if constexpr (std::is_same_v<Element, BFloat16Pair>) {
    const VectorX2<float> lower = d + 1 < depth.end ? decode_x2<T>(m, decoder, d + 1, column) : VectorX2<float>{};
    const auto pairs = [](Vector<float> low, Vector<float> high) {
      return round_to_bfloat16(low) >> 16 | (round_to_bfloat16(high) & 0xffff0000U);
    };
    return {pairs(upper.first, lower.first), pairs(upper.second, lower.second)};
  } else {
    return {rounded<T>(upper.first), rounded<T>(upper.second)};
  }
}

// double has half as many lanes, and no kernel of its own: rows are decoded to float, and their elements copied.
template <class Decoder>
void pack_doubles(const QuantizedMatrix& m, const Decoder& decoder, bool is_transposed, Range depth, Range columns,
                  double* panels) {
  constexpr int kWidth = kNR<double>;
  const Range rows = is_transposed ? columns : depth;
  const Range in_row = is_transposed ? depth : columns;
  const auto place = [&](int64_t d, int64_t column) -> double& {
    return panels[column / kWidth * kWidth * depth.size() + d * kWidth + column % kWidth];
  };
  for (int64_t r = 0; r < rows.size(); ++r) {
    for (int64_t i = 0; i < in_row.size(); ++i) {
      // The vector that holds an element begins at a multiple of its size.
      const int64_t at = in_row.begin + i;
      const int64_t first = at / kDecodedColumns * kDecodedColumns;
      const VectorX2<float> values = decode_x2<float>(m, decoder, rows.begin + r, first);
      for (; i < in_row.size() && in_row.begin + i < first + kDecodedColumns; ++i) {
        const int64_t lane = in_row.begin + i - first;
        const float value = lane < kLanes<float> ? values.first[lane] : values.second[lane - kLanes<float>];
        (is_transposed ? place(i, r) : place(r, i)) = static_cast<double>(value);
      }
      --i;
    }
  }
}

// pack_b for a quantized b. `columns` begins at a multiple of kDecodedColumns or of the width of a panel.
template <class Element, class T>
void pack_quantized_b(const GemmOperand<T>& b, Range depth, Range columns, Element* panels) {
  constexpr int kWidth = kNR<Accumulator<T>>;
  count_packed(depth.size() * columns.size());
  const QuantizedMatrix& m = b.quantized;
  const int64_t panel_size = steps_of_depth<Element>(depth.size()) * kWidth;
  with_decoder(m, [&](const auto& decoder) {
    if constexpr (std::is_same_v<T, double>) {
      pack_doubles(m, decoder, b.is_transposed, depth, columns, panels);
    } else if (b.is_transposed) {
      Element* panel = panels;
      for (int64_t column = columns.begin; column < columns.end; column += kWidth, panel += panel_size) {
#if defined(MAXMOE_DECODES_PAIRS)
        if constexpr (std::is_same_v<Element, BFloat16Pair>) {
          if (pack_pairs_along_depth(m, {column, columns.end}, depth, panel)) continue;
        }
#endif
        pack_panel_along_depth<Element, T>(m, decoder, {column, columns.end}, depth, panel);
      }
    } else {
#if defined(MAXMOE_DECODES_PAIRS)
      if constexpr (std::is_same_v<Element, BFloat16Pair>) {
        if (columns.size() % kWidth == 0 && packs_pairs(b)) {
          return pack_pairs_row_major(m, depth, columns, panels);
        }
      }
#endif
      Element* step = panels;
      for (int64_t d = depth.begin; d < depth.end; d += kDepthPerStep<Element>, step += kWidth) {
        Element* target = step;
        for (int64_t column = columns.begin; column < columns.end; column += kWidth, target += panel_size) {
          const auto values = decode_step<Element, T>(m, decoder, d, depth, column);
          store_vector(target, values.first);
          store_vector(target + kLanes<Element>, values.second);
        }
      }
    }
  });
}

#define MAXMOE_INSTANTIATE_FOR(T) template void pack_quantized_b(const GemmOperand<T>&, Range, Range, ElementOf<T>*);

MAXMOE_FOR_EACH_TYPE(MAXMOE_INSTANTIATE_FOR)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
