// The skinny product with a quantized B: skinny_product.simd.h.
//
// Quantized values that run along the inner dimension are multiplied as they are decoded: to pairs with AVX512-BF16
// (vnni.simd.cpp), some of them to floats with AVX2 and AVX-512 (float_product.simd.cpp). Otherwise blocks of B are
// decoded, which stay in the first-level cache, and multiplied there like any B.
#include "kernels/product/skinny/quantized.simd.h"

#include "kernels/product/skinny/skinny_product.simd.h"
#include "kernels/product/tiled/blocking.simd.h"
#include "kernels/quantized/decode_rows.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Bytes of a decoded block. With 16 KiB, 12 rows took up to 1.1 times the time; with 8 KiB, every number of rows did.
constexpr int64_t kDecodedBytes = int64_t{32} * 1024;

// The size of a block of b: the columns that a kernel multiplies at a time if columns are rows of quantized values,
// otherwise short parts of rows.
template <class T>
BlockOfB first_decoded_block(const GemmOperand<T>& b, Range columns) {
  const int64_t width = b.is_transposed ? 2 * kNR<Accumulator<T>> : 256;
  const int64_t depth = kDecodedBytes / int64_t{sizeof(T)} / width;
  return {range_from(0, depth, b.rows()), range_from(columns.begin, width, columns.end)};
}

// The distance in bytes from the quantized values of a block to the next block: of the same columns, or the first block
// of the next columns.
template <class T>
int64_t next_block_distance(const GemmOperand<T>& b, const BlockOfB& block) {
  const QuantizedMatrix& m = b.quantized;
  if (!b.is_transposed) return block.depth.size() * m.row_bytes;
  if (block.depth.end < b.rows()) return m.bytes_of(block.depth.size());
  return block.columns.size() * m.row_bytes - m.bytes_of(block.depth.begin);
}

// Computes sums = a * b, or += if `accumulate`, for columns of b, block by block.
template <class T, class Element>
void multiply_decoded(const RowGroups<Element>& a, const GemmOperand<T>& b, Range columns,
                      MatrixView<Accumulator<T>> sums, bool accumulate) {
  const BlockOfB first = first_decoded_block(b, columns);
  for (int64_t column = columns.begin; column < columns.end; column += first.columns.size()) {
    for (int64_t d = 0; d < b.rows(); d += first.depth.size()) {
      const BlockOfB block{range_from(d, first.depth.size(), b.rows()),
                           range_from(column, first.columns.size(), columns.end)};
      const GemmOperand<T> decoded = decoded_block(b, block.depth, block.columns, next_block_distance(b, block));
      const MatrixView<Accumulator<T>> of_columns = sums.column_range(block.columns.begin, block.columns.end);
      RowGroups<Element> steps = a;
      steps.first_step = d / kDepthPerStep<Element>;
      const auto multiply =
          b.is_transposed ? multiply_skinny_transposed<T, Element> : multiply_skinny_row_major<T, Element>;
      multiply(steps, decoded.memory, of_columns, accumulate || d > 0, {});
    }
  }
}

}  // namespace

template <class T, class Element>
void multiply_skinny_quantized(const RowGroups<Element>& a, const GemmOperand<T>& b,
                               [[maybe_unused]] const GemmOperand<T>& next_b, MatrixView<Accumulator<T>> sums,
                               bool accumulate) {
#if MAXMOE_DECODES_PAIRS
  if constexpr (std::is_same_v<Element, BFloat16Pair>) {
    if (b.is_transposed) {
      const VnniProduct p{a.data, a.num_rows, b.quantized, next_b.quantized, sums, accumulate};
      for (int64_t column = 0; column < sums.columns;) {
        const int64_t num_columns = multiply_vnni(p, column);
        const Range panel = range_from(column, kNR<float>, sums.columns);
        if (num_columns == 0) multiply_decoded(a, b, panel, sums, accumulate);
        column = num_columns == 0 ? panel.end : column + num_columns;
      }
      return;
    }
  }
#endif
  if constexpr (std::is_same_v<Element, float>) {
    if (b.is_transposed && a.num_rows <= kMaxRowsOfWords && multiplies_words<T>(b.quantized)) {
      const FloatProduct p{a[0].steps, a.num_rows, b.quantized, next_b.quantized, sums, accumulate};
      for (int64_t column = 0; column < sums.columns; column += kNR<float>) {
        if (multiply_words_of_panel<T>(p, column)) continue;
        multiply_decoded(a, b, range_from(column, kNR<float>, sums.columns), sums, accumulate);
      }
      return;
    }
  }
  multiply_decoded(a, b, {0, sums.columns}, sums, accumulate);
}

#define MAXMOE_INSTANTIATE_FOR(T)                                                                \
  template void multiply_skinny_quantized(const RowGroups<ElementOf<T>>&, const GemmOperand<T>&, \
                                          const GemmOperand<T>&, MatrixView<Accumulator<T>>, bool);

MAXMOE_FOR_EACH_TYPE(MAXMOE_INSTANTIATE_FOR)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
