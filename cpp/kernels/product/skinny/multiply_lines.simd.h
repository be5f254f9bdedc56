// The skinny product of A with quantized values that run along the inner dimension, for any decoder.
//
// Pairs are multiplied as they are decoded, and never stored. Each vector of columns is one chain of multiply-adds per
// row, and vdpbf16ps has a latency of 6 cycles: one row needs more vectors at a time than several rows.
//
// There is a class for each way to decode:
//
//   fits                whether it gives the bits of the definition for some columns: instructions of AVX512-BF16 treat
//                       subnormals as zero
//   kBits               of a code
//   kIsCommon           whether one object decodes all vectors of columns
//   kScalesSums         whether sums are scaled, not weights: begin_block then returns the factor
//   kMinRowsAhead       number of rows from which on words are decoded ahead: the next word is decoded before a word is
//                       multiplied. With fewer rows this makes no difference, or is slower
//   begin_block         reads the scales of the next block of the inner dimension
//   decode              the pairs of a word
#pragma once

#include "kernels/product/skinny/vnni_product.simd.h"
#include "kernels/quantized/lines.simd.h"

#if MAXMOE_DECODES_PAIRS

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

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

// The distance in bytes from quantized values to those that are prefetched meanwhile: of the next columns, or the first
// bytes of the next product.
MAXMOE_INLINE int64_t prefetch_distance(const VnniProduct& p, int64_t column, int64_t width) {
  const bool is_last = column + width >= p.codes.rows && p.next_codes.data != nullptr;
  return is_last
             ? reinterpret_cast<intptr_t>(p.next_codes.code(0, 0)) - reinterpret_cast<intptr_t>(p.codes.code(column, 0))
             : width * p.codes.row_bytes;
}

// The sums of kRows rows and kVectors vectors of columns, in registers: all loops over them are unrolled.
template <int kVectors, int kRows>
struct SumsOfVectors {
  Vector<float> of[kRows][kVectors];

  MAXMOE_INLINE void load(const VnniProduct& p, int64_t column) {
    for_each(p, column, [&](Vector<float>& sum, const float* source) MAXMOE_INLINE_LAMBDA {
      sum = p.accumulate ? load_vector(source) : Vector<float>{};
    });
  }
  MAXMOE_INLINE void store(const VnniProduct& p, int64_t column) {
    for_each(p, column,
             [](Vector<float> sum, float* target) MAXMOE_INLINE_LAMBDA { store_vector<float>(target, sum); });
  }
  MAXMOE_INLINE void scale(int v, __m512 factor) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) of[r][v] *= std::bit_cast<Vector<float>>(factor);
  }

 private:
  template <class Body>
  MAXMOE_INLINE void for_each(const VnniProduct& p, int64_t column, const Body& body) {
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) body(of[r][v], p.sums.row(r) + column + v * kLanes<float>);
    }
  }
};

// Computes the sums of kVectors vectors of columns from `column` on.
template <class Decoder, int kVectors, int kRows>
__attribute__((noinline)) void multiply_lines(const VnniProduct& p, const ForVectors<CodeColumns, kVectors>& columns,
                                              int64_t column) {
  constexpr std::make_integer_sequence<int, kVectors> kIndices;
  constexpr int kDecoders = Decoder::kIsCommon ? 1 : kVectors;
  constexpr int kSteps = 16 / Decoder::kBits;  // in a word
  constexpr int64_t kPerLine = kCodesPerLine<Decoder::kBits>;
  constexpr int64_t kPerWord = kCodesPerWord<Decoder::kBits>;
  constexpr bool kDecodesAhead = kRows >= Decoder::kMinRowsAhead;
  const int64_t ahead = prefetch_distance(p, column, kVectors * kLanes<float>);
  auto decoders =
      for_vectors<Decoder>(std::make_integer_sequence<int, kDecoders>(), [&](int v) { return Decoder(columns.of[v]); });
  auto readers = for_vectors<LineReader>(kIndices, [&](int v) { return LineReader(columns.of[v], ahead); });
  const SkinnyRows<BFloat16Pair, kRows> a{p.a};
  alignas(64) __m512i words[kVectors][16];
  SumsOfVectors<kVectors, kRows> sums;
  sums.load(p, column);
  for_each_part<kPerLine>(columns.of[0].m, columns.of[0].depth, [&](Range part, int64_t block) MAXMOE_INLINE_LAMBDA {
    if (part.begin % kPerLine == 0) {
      for (int v = 0; v < kVectors; ++v) readers.of[v].next(words[v]);
    }
#pragma GCC unroll 4
    for (int v = 0; v < kDecoders && block >= 0; ++v) {
      if constexpr (Decoder::kScalesSums) {
        sums.scale(v, decoders.of[v].begin_block(block));
      } else {
        decoders.of[v].begin_block(block);
      }
    }
    const auto decode = [&](int v, int64_t d) MAXMOE_INLINE_LAMBDA {
      const int64_t word = d % kPerLine / kPerWord;
      readers.of[v].prefetch(word);
      return decoders.of[Decoder::kIsCommon ? 0 : v].decode(words[v][word]);
    };
    const auto multiply = [&](int v, int64_t d, int64_t num_steps, const auto& pairs) MAXMOE_INLINE_LAMBDA {
      SkinnyRows<BFloat16Pair, kRows> of_vector = a;
      // Otherwise the compiler keeps the elements of A in registers for the next vector of columns, and spills sums.
      if constexpr (kDecodesAhead) asm volatile("" : "+r"(of_vector.data));
#pragma GCC unroll 4
      for (int step = 0; step < kSteps; ++step) {
        if (step >= num_steps) break;
        const auto of_step = std::bit_cast<Vector<BFloat16Pair>>(pairs(step));
#pragma GCC unroll 8
        for (int r = 0; r < kRows; ++r) {
          sums.of[r][v] = multiply_add(sums.of[r][v], of_vector(r, d / 2 + step), of_step);
        }
      }
    };
    int64_t d = part.begin;
    WordPairs<Decoder::kBits> previous;
    for (; d + kPerWord <= part.end; d += kPerWord) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        const auto pairs = decode(v, d);
        if constexpr (!kDecodesAhead) {
          multiply(v, d, kSteps, pairs);
        } else if (v > 0) {
          multiply(v - 1, d, kSteps, previous);
        } else if (d > part.begin) {
          multiply(kVectors - 1, d - kPerWord, kSteps, previous);
        }
        previous = pairs;
      }
    }
    if (kDecodesAhead && d > part.begin) multiply(kVectors - 1, d - kPerWord, kSteps, previous);
    if (d == part.end) return;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) multiply(v, d, steps_of_depth<BFloat16Pair>(part.end - d), decode(v, d));
  });
  if constexpr (Decoder::kScalesSums) {
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) sums.scale(v, decoders.of[v].end());
  }
  sums.store(p, column);
}

// The vectors of kVectors / 2 micro-panels from `column` on, if there are so many columns.
template <int kVectors>
MAXMOE_INLINE ForVectors<CodeColumns, kVectors> vectors_at(const VnniProduct& p, int64_t column) {
  return for_vectors<CodeColumns>(std::make_integer_sequence<int, kVectors>(), [&](int v) {
    return code_columns(p.codes, {column + v / 2 * kNR<float>, p.codes.rows}, {0, p.codes.columns}, v % 2);
  });
}

// Whether fits(columns) for all vectors.
template <int kVectors, class Fits>
MAXMOE_INLINE bool all_fit(const ForVectors<CodeColumns, kVectors>& columns, const Fits& fits) {
  for (const CodeColumns& of_vector : columns.of) {
    if (!fits(of_vector)) return false;
  }
  return true;
}

// multiply_lines for at most kMaxRows rows. Returns the number of columns.
template <class Decoder, int kMaxRows, int kVectors>
int64_t multiply_columns(const VnniProduct& p, const ForVectors<CodeColumns, kVectors>& columns, int64_t column) {
  with_number_of_rows(
      p.num_rows, [&]<int kRows> { multiply_lines<Decoder, kVectors, kRows>(p, columns, column); },
      std::make_integer_sequence<int, kMaxRows>());
  return kVectors * kLanes<float>;
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE

#endif
