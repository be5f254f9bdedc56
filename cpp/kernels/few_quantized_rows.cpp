// The product of few rows of A with a quantized B: few_rows.h.
//
// With AVX512-BF16 codes that run along the inner dimension are multiplied as they are decoded (few_rows_of_codes.h).
// Otherwise blocks of B are decoded, which stay in the first-level cache, and multiplied there like any B.
#include "few_quantized_rows.h"

#include "blocking.h"
#include "decode_rows.h"
#include "few_row_major_rows.h"
#include "few_transposed_rows.h"
#include "pack_quantized.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Bytes of a decoded block.
constexpr int64_t kDecodedBytes = 16 * 1024;

// Rows of codes in a block. If they are columns of B, as many as the kernel multiplies at a time.
template <class T>
int64_t rows_of_block(const GemmOperand<T>& b) {
  constexpr int64_t kColumns = 256;
  return b.is_transposed ? 2 * kNR<Accumulator<T>> : kDecodedBytes / int64_t{sizeof(T)} / kColumns;
}

// Computes sums = a * b, or += if `accumulate`, for columns of b, block by block.
template <class T, class Element>
void multiply_decoded(const RowGroups<Element>& a, const GemmOperand<T>& b, Range columns,
                      MatrixView<Accumulator<T>> sums, bool accumulate) {
  const int64_t rows = rows_of_block(b);
  const int64_t in_row = kDecodedBytes / int64_t{sizeof(T)} / rows;
  const int64_t block_depth = b.is_transposed ? in_row : rows;
  const int64_t block_columns = b.is_transposed ? rows : in_row;
  for (int64_t column = columns.begin; column < columns.end; column += block_columns) {
    const Range of_block = range_from(column, block_columns, columns.end);
    const MatrixView<Accumulator<T>> of_columns = sums.column_range(of_block.begin, of_block.end);
    for (int64_t d = 0; d < b.rows(); d += block_depth) {
      const Range depth = range_from(d, block_depth, b.rows());
      const int64_t ahead = depth.end < b.rows() ? b.quantized.bytes_of(block_depth)
                                                 : b.quantized.row_bytes * rows - b.quantized.bytes_of(d);
      const GemmOperand<T> decoded =
          decoded_block(b, depth, of_block, b.is_transposed ? ahead : b.quantized.row_bytes * rows);
      RowGroups<Element> steps = a;
      steps.first_step = d / kDepthPerStep<Element>;
      const bool continues = accumulate || d > 0;
      if (b.is_transposed) {
        multiply_few_rows_transposed<T, Element>(steps, decoded.memory, of_columns, continues, {});
      } else {
        multiply_few_rows_row_major<T, Element>(steps, decoded.memory, of_columns, continues, {});
      }
    }
  }
}

}  // namespace

template <class T, class Element>
void multiply_few_rows_quantized(const RowGroups<Element>& a, const GemmOperand<T>& b,
                                 [[maybe_unused]] const GemmOperand<T>& next_b, MatrixView<Accumulator<T>> sums,
                                 bool accumulate) {
#if defined(MAXMOE_DECODES_PAIRS)
  if constexpr (std::is_same_v<Element, BFloat16Pair>) {
    if (b.is_transposed) {
      const int64_t count = b.quantized.codes == Codes::e2m1 ? steps_of_depth<Element>(b.rows()) * a.num_rows : 0;
      const FewRowsOfCodes p{a.data, a.num_rows, exponents_of_pairs(a.data, count), b.quantized, next_b.quantized,
                             sums,   accumulate};
      const auto multiply =
          bits_per_code(b.quantized.codes) == 4 ? multiply_few_rows_of_4_bits : multiply_few_rows_of_8_bits;
      for (int64_t column = 0; column < sums.columns;) {
        const int64_t num_columns = multiply(p, column);
        const Range panel = range_from(column, kNR<float>, sums.columns);
        if (num_columns == 0) multiply_decoded(a, b, panel, sums, accumulate);
        column = num_columns == 0 ? panel.end : column + num_columns;
      }
      return;
    }
  }
#endif
  multiply_decoded(a, b, {0, sums.columns}, sums, accumulate);
}

#define MAXMOE_INSTANTIATE_FOR(T)                                                                  \
  template void multiply_few_rows_quantized(const RowGroups<ElementOf<T>>&, const GemmOperand<T>&, \
                                            const GemmOperand<T>&, MatrixView<Accumulator<T>>, bool);

MAXMOE_FOR_EACH_TYPE(MAXMOE_INSTANTIATE_FOR)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
