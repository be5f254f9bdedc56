// The product of few rows of A with a quantized B: few_rows.h.
//
// With AVX512-BF16 codes that run along the inner dimension are multiplied as they are decoded (few_rows_of_codes.h).
// Otherwise B is decoded into micro-panels so short that they stay in the first-level cache.
#include "few_quantized_rows.h"

#include "blocking.h"
#include "few_rows_of_codes.h"
#include "pack_quantized.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Computes sums[kRows, kVectorsX2 * NR] = a * b, or += if `accumulate`, for steps [first_step, first_step + num_steps)
// of a and as many steps of kVectorsX2 micro-panels, one after the other.
template <class T, class Element, int kRows, int kVectorsX2>
MAXMOE_INLINE void multiply_few_rows_panels(FewRows<Element, kRows> a, int64_t first_step, int64_t num_steps,
                                            const Element* panels, Accumulator<T>* sums, int64_t sums_stride,
                                            bool accumulate) {
  using S = Accumulator<T>;
  constexpr int kVectors = 2 * kVectorsX2;
  Vector<S> sum[kRows][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = accumulate ? load_vector(sums + r * sums_stride + v * kLanes<S>) : Vector<S>{};
    }
  }
  for (int64_t k = 0; k < num_steps; ++k) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) {
      const Element* panel = panels + v / 2 * num_steps * kNR<S>;
      const Vector<Element> step = load_vector(panel + k * kNR<S> + v % 2 * kLanes<Element>);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) sum[r][v] = multiply_add(sum[r][v], a(r, first_step + k), step);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kVectors; ++v) store_vector<S>(sums + r * sums_stride + v * kLanes<S>, sum[r][v]);
  }
}

// Number of steps of the inner dimension that are decoded at a time: with 4 panels of 32 columns, 16 KiB.
constexpr int64_t kFewRowsSteps = 32;

// The product with a quantized b. Panels of columns are the outer loop, so that the sums of a panel stay in the
// first-level cache.
template <class T, class Element, int kRows>
void multiply_rows_quantized(FewRows<Element, kRows> a, const GemmOperand<T>& b,
                             [[maybe_unused]] const GemmOperand<T>& next_b, MatrixView<Accumulator<T>> sums,
                             bool accumulate) {
  constexpr int kWideX2 = few_rows_vectors_x2(kRows);
  constexpr int64_t kWidth = kNR<Accumulator<T>>;
  constexpr int64_t kDepth = kFewRowsSteps * kDepthPerStep<Element>;
  alignas(64) Element panels[kWideX2 * kWidth * kFewRowsSteps];
  const auto multiply_columns = [&]<int kVectorsX2>(int64_t column, Range of_b) {
    for (int64_t d = of_b.begin; d < of_b.end; d += kDepth) {
      const Range depth = range_from(d, kDepth, of_b.end);
      pack_quantized_b<Element>(b, depth, {column, column + kVectorsX2 * kWidth}, static_cast<Element*>(panels));
      multiply_few_rows_panels<T, Element, kRows, kVectorsX2>(a, d / kDepthPerStep<Element>,
                                                              steps_of_depth<Element>(depth.size()), panels,
                                                              sums.data + column, sums.row_stride, accumulate || d > 0);
    }
  };
  int64_t column = 0;
#if defined(MAXMOE_DECODES_PAIRS)
  if constexpr (std::is_same_v<Element, BFloat16Pair>) {
    const int64_t count = b.quantized.codes == Codes::e2m1 ? steps_of_depth<Element>(b.rows()) * kRows : 0;
    const FewRowsOfCodes p{a.data, kRows,     exponents_of_pairs(a.data, count), b.quantized, next_b.quantized,
                           sums,   accumulate};
    const auto multiply =
        bits_per_code(b.quantized.codes) == 4 ? multiply_few_rows_of_4_bits : multiply_few_rows_of_8_bits;
    while (b.is_transposed && column < sums.columns) {
      const int64_t num_columns = multiply(p, column);
      if (num_columns == 0) multiply_columns.template operator()<1>(column, {0, b.rows()});
      column += num_columns == 0 ? kWidth : num_columns;
    }
  }
#endif
  const Range all{0, b.rows()};
  for (; column + kWideX2 * kWidth <= sums.columns; column += kWideX2 * kWidth) {
    multiply_columns.template operator()<kWideX2>(column, all);
  }
  for (; column < sums.columns; column += kWidth) multiply_columns.template operator()<1>(column, all);
}

template <class T, class Element>
void multiply_few_rows_quantized(const RowGroups<Element>& a, const GemmOperand<T>& b, const GemmOperand<T>& next_b,
                                 MatrixView<Accumulator<T>> sums, bool accumulate) {
  with_number_of_rows(
      a.num_rows,
      [&]<int kRows> {
        multiply_rows_quantized<T, Element, kRows>(FewRows<Element, kRows>{a.data}, b, next_b, sums, accumulate);
      },
      std::make_integer_sequence<int, kMaxFewQuantizedRows<Element>>());
}

#define MAXMOE_INSTANTIATE_FOR(T)                                                                  \
  template void multiply_few_rows_quantized(const RowGroups<ElementOf<T>>&, const GemmOperand<T>&, \
                                            const GemmOperand<T>&, MatrixView<Accumulator<T>>, bool);

MAXMOE_FOR_EACH_TYPE(MAXMOE_INSTANTIATE_FOR)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
