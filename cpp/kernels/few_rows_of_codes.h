// The product of few rows of A with 4-bit codes that run along the inner dimension. Only for the .cpp files that are
// compiled per instruction set.
//
// Pairs are multiplied as they are decoded, and never stored. Each vector of columns is one chain of multiply-adds per
// row, and vdpbf16ps has a latency of 6 cycles: one row needs more vectors at a time than several rows.
#pragma once

#include "column_tables.h"
#include "pack_pairs.h"
#include "unscaled_e2m1.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Few rows of A, converted to the elements that a step multiplies. The elements of a step are neighbours, so that one
// pointer reaches all rows, and no two of them share a set of the first-level cache.
template <class Element, int kRows>
struct FewRows {
  const Element* data;
  MAXMOE_INLINE Element operator()(int r, int64_t step) const { return data[step * kRows + r]; }
};

#if defined(MAXMOE_DECODES_PAIRS)
// The arguments of a product of kRows rows with micro-panels of codes.
template <int kRows>
struct FewRowsOfCodes {
  FewRows<BFloat16Pair, kRows> a;
  Exponents of_a;
  const QuantizedMatrix& codes;
  const QuantizedMatrix& next_codes;  // of the next product, without data if it has none
  MatrixView<float> sums;
  bool accumulate;
};

// Objects of class Object for kVectors vectors of columns.
template <class Object, int kVectors>
struct ForVectors {
  Object of[kVectors];
};

template <class Object, int... kVector, class Make>
MAXMOE_INLINE ForVectors<Object, sizeof...(kVector)> for_vectors(std::integer_sequence<int, kVector...> /*vectors*/,
                                                                 const Make& make) {
  return {{make(kVector)...}};
}

// Computes the sums of kVectors vectors of columns from `column` on. At a distance of `ahead` bytes codes are
// prefetched.
template <class Decoder, int kVectors, int kRows>
MAXMOE_INLINE void multiply_lines(const FewRowsOfCodes<kRows>& p, const ForVectors<CodeColumns, kVectors>& columns,
                                  int64_t column, int64_t ahead) {
  constexpr std::make_integer_sequence<int, kVectors> kIndices;
  auto decoders = for_vectors<Decoder>(kIndices, [&](int v) { return Decoder(columns.of[v]); });
  auto readers = for_vectors<LineReader>(kIndices, [&](int v) { return LineReader(columns.of[v], ahead); });
  alignas(64) __m512i words[kVectors][16];
  Vector<float> sum[kRows][kVectors];
  const auto for_each_sum = [&](const auto& body) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) body(sum[r][v], p.sums.row(r) + column + v * kLanes<float>, v);
    }
  };
  for_each_sum([&](Vector<float>& s, const float* source, int /*v*/)
                   MAXMOE_INLINE_LAMBDA { s = p.accumulate ? load_vector(source) : Vector<float>{}; });
  const auto scale_sums = [&](int v, __m512 factor) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) sum[r][v] *= std::bit_cast<Vector<float>>(factor);
  };
  for_each_chunk<kMinColumnsPerScale>(columns.of[0], [&](int64_t d, int64_t block) MAXMOE_INLINE_LAMBDA {
    if (d % kCodesPerLine == 0) {
      for (int v = 0; v < kVectors; ++v) readers.of[v].next(words[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kVectors && block >= 0; ++v) {
      if constexpr (Decoder::kScalesSums) {
        scale_sums(v, decoders.of[v].begin_block(block));
      } else {
        decoders.of[v].begin_block(block);
      }
    }
    const auto multiply = [&](int64_t first, int64_t num_steps) MAXMOE_INLINE_LAMBDA {
      const int64_t word = first % kCodesPerLine / kCodesPerWord;
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        readers.of[v].prefetch(word);
        const FourSteps values = decoders.of[v].decode(words[v][word]);
#pragma GCC unroll 4
        for (int step = 0; step < 4; ++step) {
          if (step >= num_steps) break;
          const auto of_step = std::bit_cast<Vector<BFloat16Pair>>(values.step[step]);
#pragma GCC unroll 8
          for (int r = 0; r < kRows; ++r) sum[r][v] = multiply_add(sum[r][v], p.a(r, first / 2 + step), of_step);
        }
      }
    };
    const int64_t end = at_most(p.codes.columns, d + kMinColumnsPerScale);
    for (; d + kCodesPerWord <= end; d += kCodesPerWord) multiply(d, 4);
    if (d < end) multiply(d, steps_of_depth<BFloat16Pair>(end - d));
  });
  if constexpr (Decoder::kScalesSums) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) scale_sums(v, decoders.of[v].end());
  }
  for_each_sum([&](Vector<float> s, float* target, int /*v*/) MAXMOE_INLINE_LAMBDA { store_vector<float>(target, s); });
}

// Largest number of rows with tables: the accumulators of more rows take their registers.
constexpr int kMaxRowsOfTables = 2;

// Computes the sums of kVectors / 2 micro-panels; false if no decoder has the bits of the definition.
template <int kVectors, int kRows>
bool multiply_few_rows_of_codes(const FewRowsOfCodes<kRows>& p, int64_t column) {
  const auto columns = for_vectors<CodeColumns>(std::make_integer_sequence<int, kVectors>(), [&](int v) {
    return code_columns(p.codes, {column + v / 2 * kNR<float>, p.codes.rows}, {0, p.codes.columns}, v % 2);
  });
  const auto all_fit = [&](const auto& fits) {
    for (const CodeColumns& of_vector : columns.of) {
      if (!fits(of_vector)) return false;
    }
    return true;
  };
  // The next columns, or the first bytes of the next product.
  const int64_t width = kVectors * kLanes<float>;
  const bool is_last = column + width >= p.codes.rows && p.next_codes.data != nullptr;
  const int64_t ahead = is_last ? reinterpret_cast<intptr_t>(p.next_codes.code(0, 0)) -
                                      reinterpret_cast<intptr_t>(p.codes.code(column, 0))
                                : width * p.codes.row_bytes;
  if (p.codes.codes == Codes::e2m1) {
    Exponents of_sums;
    for (int r = 0; r < kRows && p.accumulate; ++r) {
      const Exponents of_row = exponents_of_floats(p.sums.row(r) + column, kVectors * kLanes<float>);
      of_sums.add(of_row.min, of_row.max);
    }
    if (all_fit([&](const CodeColumns& c) { return UnscaledE2M1::fits(c, p.of_a, of_sums); })) {
      multiply_lines<UnscaledE2M1>(p, columns, column, ahead);
      return true;
    }
  }
  if constexpr (kVectors == 2 && kRows <= kMaxRowsOfTables) {
    if (all_fit(ColumnTables::fits)) {
      multiply_lines<ColumnTables>(p, columns, column, ahead);
      return true;
    }
  }
  return false;
}
#endif

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
