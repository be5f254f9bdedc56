// The product of few rows of A with a quantized B: few_rows.h. Only for the .cpp files that are compiled per
// instruction set.
//
// With AVX512-BF16 pairs are multiplied as they are decoded, and never stored: 4-bit codes in few_rows_of_codes.h,
// others and what does not fit there in parts of cache lines, here. Otherwise B is decoded into micro-panels so short
// that they stay in the first-level cache.
#pragma once

#include "executor.h"
#include "few_rows_of_codes.h"
#include "pack_quantized.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Maximum number of rows of A: the accumulators of MR rows leave registers for two vectors of B and one element of A.
constexpr int kMaxFewRows = kVectorRegisters == 32 ? 12 : 6;

// Number of VectorX2 that the kernel for `rows` rows computes at a time: a power of two, at most 4, whose accumulators
// fit into the registers. One row then has 8 independent accumulators, which cover the latency of multiply-adds.
constexpr int few_rows_vectors_x2(int rows) {
  int vectors_x2 = 4;
  while (vectors_x2 > 1 && rows * vectors_x2 > kMaxFewRows) vectors_x2 /= 2;
  return vectors_x2;
}

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

#if defined(MAXMOE_DECODES_PAIRS)
// Largest number of rows for which pairs are multiplied as they are decoded, without being stored: 2 accumulators per
// row, the codes and the scales fit into the registers.
constexpr int kMaxFusedRows = 8;

// Prefetch distance of codes in micro-panels.
constexpr int64_t kFewRowsPanelsAhead = 1;

// The inner dimension is divided in ranges of this size: a whole number of blocks, which fit a class or not.
constexpr int64_t kFusedDepth = 4096;

// Computes the sums of one micro-panel, NR columns, for a range of the inner dimension; false if the codes fit no class
// of decode_pairs.h. Two vectors of columns are two independent chains of multiply-adds per row.
template <int kRows>
MAXMOE_INLINE bool multiply_few_rows_codes(FewRows<BFloat16Pair, kRows> a, const QuantizedMatrix& m, Range columns,
                                           Range depth, float* sums, int64_t sums_stride, bool accumulate) {
  const CodeColumns of_vector[2] = {code_columns(m, columns, depth, 0), code_columns(m, columns, depth, 1)};
  return with_pairs(of_vector[0], of_vector[1], [&]<class Pairs> {
    constexpr int64_t kChunk = 8 * CodeReader::kBytes / Pairs::kBits;
    Pairs pairs[2] = {Pairs(of_vector[0]), Pairs(of_vector[1])};
    const int64_t ahead = kFewRowsPanelsAhead * kNR<float> * m.row_bytes;
    CodeReader readers[2] = {CodeReader(of_vector[0], ahead), CodeReader(of_vector[1], ahead)};
    Vector<float> sum[kRows][2];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) {
        sum[r][v] = accumulate ? load_vector(sums + r * sums_stride + v * kLanes<float>) : Vector<float>{};
      }
    }
    for_each_chunk<kChunk>(of_vector[0], [&](int64_t d, int64_t block) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 2
      for (int v = 0; v < 2 && block >= 0; ++v) pairs[v].begin_block(block);
      const typename Pairs::Chunk codes[2] = {readers[0].next<Pairs>(), readers[1].next<Pairs>()};
      const int64_t num_steps = steps_of_depth<BFloat16Pair>(depth.end - d);
      const auto multiply = [&]<int step>() MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
          const auto values = std::bit_cast<Vector<BFloat16Pair>>(pairs[v].template decode<step>(codes[v]));
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sum[r][v] = multiply_add(sum[r][v], a(r, d / 2 + step), values);
        }
      };
      [&]<int... step>(std::integer_sequence<int, step...>) MAXMOE_INLINE_LAMBDA {
        if (depth.end - d >= kChunk) {
          (multiply.template operator()<step>(), ...);
        } else {
          (((step < num_steps) ? multiply.template operator()<step>() : void()), ...);
        }
      }(std::make_integer_sequence<int, kStepsPerChunk<Pairs>>());
    });
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) store_vector<float>(sums + r * sums_stride + v * kLanes<float>, sum[r][v]);
    }
  });
}
#endif

// Maximum number of rows of A for a quantized B: pairs of more rows are multiplied faster with packed blocks of B.
template <class Element>
constexpr int kMaxFewQuantizedRows = kMaxFewRows;
#if defined(MAXMOE_DECODES_PAIRS)
template <>
inline constexpr int kMaxFewQuantizedRows<BFloat16Pair> = kMaxFusedRows;
#endif

// The product with a quantized b. Panels of columns are the outer loop, so that the sums of a panel stay in the
// first-level cache.
template <class T, class Element, int kRows>
void multiply_few_rows_quantized(FewRows<Element, kRows> a, const GemmOperand<T>& b,
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
  if constexpr (std::is_same_v<Element, BFloat16Pair> && kRows <= kMaxFusedRows) {
    const int64_t count = b.quantized.codes == Codes::e2m1 ? steps_of_depth<Element>(b.rows()) * kRows : 0;
    const FewRowsOfCodes<kRows> p{a,         exponents_of_pairs(a.data, count), b.quantized, next_b.quantized, sums,
                                  accumulate};
    for (; b.is_transposed && column < sums.columns; column += kWidth) {
      if (kRows <= 2 && column + 2 * kWidth <= sums.columns && multiply_few_rows_of_codes<4>(p, column)) {
        column += kWidth;
        continue;
      }
      if (multiply_few_rows_of_codes<2>(p, column)) continue;
      for (int64_t d = 0; d < b.rows(); d += kFusedDepth) {
        const Range depth = range_from(d, kFusedDepth, b.rows());
        const bool is_done = multiply_few_rows_codes<kRows>(a, b.quantized, {column, b.columns()}, depth,
                                                            sums.data + column, sums.row_stride, accumulate || d > 0);
        if (!is_done) multiply_columns.template operator()<1>(column, depth);
      }
    }
  }
#endif
  const Range all{0, b.rows()};
  for (; column + kWideX2 * kWidth <= sums.columns; column += kWideX2 * kWidth) {
    multiply_columns.template operator()<kWideX2>(column, all);
  }
  for (; column < sums.columns; column += kWidth) multiply_columns.template operator()<1>(column, all);
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
