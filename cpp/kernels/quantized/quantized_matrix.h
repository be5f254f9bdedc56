// Views of quantized matrices, as published checkpoints have them: codes of 4 or 8 bits, and scales. The first of two
// 4-bit codes in a byte is in the low half, unless the format has the high half first.
//
// An element is lookup(code) - zero, times a scale: one product in float, rounded once to the type that a kernel
// computes in. Where rows have scales, too, the scale is the product of the scale of the block and of the row, rounded
// to float. Rows are contiguous in memory: for the weights of published checkpoints a row is an output feature.
#pragma once

#include "kernels/matrix/matrix_view.h"
#include "kernels/quantized/codes.h"

namespace maxmoe {

// The smallest number of columns of a block with which decoders across the inner dimension read 32 columns at a time.
// Blocks are powers of two, so that 32 consecutive columns from a multiple of 32 on have one scale then.
constexpr int64_t kMinColumnsPerScale = 32;

// Codes of a matrix without a format, which has no memory.
inline constexpr Codes kNoCodes{.bits = 8};

struct QuantizedMatrix {
  const Codes* codes = &kNoCodes;  // of one of the formats (formats.h)
  const uint8_t* data = nullptr;
  int64_t row_bytes = 0;  // from one row to the next
  int64_t rows = 0;
  int64_t columns = 0;

  ScaleType scale_type = ScaleType::float32;
  const std::byte* scales = nullptr;
  const uint8_t* zeros = nullptr;     // in the order of the scales; null without zero points
  const float* row_scales = nullptr;  // one for each row; null without
  int64_t scales_per_row = 0;
  int log2_rows_per_scale = 0;
  int log2_columns_per_scale = 0;

  // The first element of a part of the matrix: rows and columns are counted from there.
  int64_t first_row = 0;
  int64_t first_column = 0;

  // Set by with_scales_read at the begin of a product: whether no scaled value is subnormal or infinite, so that codes
  // can be decoded with AVX512-BF16.
  bool has_ordinary_scales = false;

  MAXMOE_INLINE QuantizedMatrix row_range(int64_t begin, int64_t end) const {
    QuantizedMatrix part = *this;
    part.first_row += begin;
    part.rows = end - begin;
    return part;
  }
  MAXMOE_INLINE QuantizedMatrix column_range(int64_t begin, int64_t end) const {
    QuantizedMatrix part = *this;
    part.first_column += begin;
    part.columns = end - begin;
    return part;
  }
  MAXMOE_INLINE int64_t bytes_of(int64_t num_columns) const { return (num_columns * codes->bits + 7) / 8; }
  // The byte with the code of an element, whose column in the whole matrix is even.
  MAXMOE_INLINE const uint8_t* code(int64_t row, int64_t column) const {
    return data + (first_row + row) * row_bytes + (first_column + column) * codes->bits / 8;
  }
  // The number of the block of columns with one scale per row that holds a column.
  MAXMOE_INLINE int64_t block(int64_t column) const { return (first_column + column) >> log2_columns_per_scale; }
  // The place of the scale of an element, and of its zero point.
  MAXMOE_INLINE int64_t scale_index(int64_t row, int64_t column) const {
    return ((first_row + row) >> log2_rows_per_scale) * scales_per_row + block(column);
  }
  // The scale of a block, without the scale of its row.
  MAXMOE_INLINE float scale(int64_t index) const { return read_scale(scale_type, scales, index); }
  MAXMOE_INLINE float row_scale(int64_t row) const {
    return row_scales == nullptr ? 1.0F : row_scales[first_row + row];
  }
  MAXMOE_INLINE float zero(int64_t index) const { return static_cast<float>(zeros[index]); }
  // The values of 4-bit codes, from which zero points are subtracted.
  MAXMOE_INLINE const CodeTable& values() const {
    return zeros == nullptr ? *codes->values : *codes->values_with_zeros;
  }
};

// Calls body(part, index) for the parts of the given columns that have one scale per row and are in one of the lines of
// kPerLine codes. `index` is the number of a block, counted from the first column, in the first part of a block,
// otherwise -1. If the columns begin at a multiple of 32, so do the parts.
template <int64_t kPerLine, class Body>
MAXMOE_INLINE void for_each_part(const QuantizedMatrix& m, Range columns, const Body& body) {
  int64_t last = -1;
  for (int64_t d = columns.begin; d < columns.end;) {
    const int64_t block = m.block(d);
    const int64_t end_of_block = ((block + 1) << m.log2_columns_per_scale) - m.first_column;
    const int64_t end_of_line = d + kPerLine - (d - columns.begin) % kPerLine;
    const int64_t end = at_most(at_most(end_of_block, end_of_line), columns.end);
    body(Range{d, end}, block == last ? -1 : block - m.block(columns.begin));
    last = block;
    d = end;
  }
}

// Quantized matrices of one shape, one per group. A matrix may be read as its transpose.
struct QuantizedStack {
  QuantizedMatrix first;
  bool is_transposed = false;
  int64_t count = 0;
  int64_t stride = 0;             // in bytes
  int64_t scales_stride = 0;      // in scales
  int64_t row_scales_stride = 0;  // the same

  MAXMOE_INLINE QuantizedMatrix operator[](int64_t index) const {
    QuantizedMatrix matrix = first;
    matrix.data += index * stride;
    matrix.scales += index * scales_stride * bytes_per_scale(first.scale_type);
    if (matrix.zeros != nullptr) matrix.zeros += index * scales_stride;
    if (matrix.row_scales != nullptr) matrix.row_scales += index * row_scales_stride;
    return matrix;
  }
  MAXMOE_INLINE bool empty() const { return first.data == nullptr; }
};

}  // namespace maxmoe
