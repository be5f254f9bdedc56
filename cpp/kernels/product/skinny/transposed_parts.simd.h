// The skinny product with a transposed B, part by part: a part of the inner dimension of some columns is
// transposed into the first-level cache, and multiplied there.
//
// For one group of rows there are two parts. While one is multiplied, the next one is transposed, block by block, so
// that the shuffles of one run beside the multiply-adds of the other: transposed in one go, one row of bfloat16
// took 1.4 times the time (AMD Zen 3 class, weights in a cache). The next columns are prefetched in the order of
// memory.
#pragma once

#include "kernels/product/accumulators.simd.h"
#include "kernels/product/skinny/row_groups.simd.h"
#include "kernels/product/tiled/pack.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Part of the inner dimension of kPanels * NR columns of b, transposed: two cache lines of each column.
template <class T, class Element, int kPanels>
class TransposedPart {
  static constexpr int kWidth = kNR<Accumulator<T>>;

 public:
  using Of = BlockElement<T, Element>;
  static constexpr int kVectors = 2 * kPanels;
  static constexpr int64_t kDepthOfLine = kCacheLineElements<T>;
  static constexpr int64_t kDepth = 2 * kDepthOfLine;
  static constexpr int kBlocksPerLine = static_cast<int>(kDepthOfLine / kDepthPerStep<Of>) / kLanes<Of>;

  // Transposes as much of the part as there is, from depth d of `columns` on.
  MAXMOE_INLINE void transpose(ConstMatrixView<T> columns, int64_t d) {
    constexpr auto kColumnOf = [](int i) { return column_of_lane<T>(i / kLanes<Of>, i % kLanes<Of>); };
#pragma GCC unroll 2
    for (int64_t i = 0; i < kPanels; ++i) {
      pack_along_depth<Of, kWidth>(GemmOperand<T>(columns), {i * kWidth, (i + 1) * kWidth},
                                   range_from(d, kDepth, columns.columns), kColumnOf, static_cast<Of*>(steps_[i]));
    }
  }

  // Transposes a block of a whole part: kLanes steps of one vector of columns. It calls halfway() when half of them are
  // in registers.
  template <class Body>
  MAXMOE_INLINE void transpose_block(ConstMatrixView<T> columns, int64_t d, int vector, int block,
                                     const Body& halfway) {
    constexpr int kHalf = kLanes<Of> / 2;
    const T* const first = columns.row(vector / 2 * kWidth + column_of_lane<T>(vector % 2, 0)) + d +
                           block * kLanes<Of> * kDepthPerStep<Of>;
    const int64_t stride = column_of_lane<T>(0, 1) * columns.row_stride;
    Vector<Of> steps[kLanes<Of>];
    const auto load_half = [&](int begin) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 4
      for (int i = begin; i < begin + kHalf; ++i) steps[i] = load_along_depth<Of>(first + i * stride);
    };
    load_half(0);
    // With two blocks of 16 bytes in a register, each half is transposed by itself first.
    if constexpr (Shuffle<Of>::kBlocks == 2) {
      transpose_within_blocks<Of>(steps);
      halfway();
      load_half(kHalf);
      transpose_within_blocks<Of>(steps + kHalf);
#pragma GCC unroll 4
      for (int i = 0; i < kHalf; ++i) split_blocks<Of>(steps[i], steps[kHalf + i]);
    } else {
      halfway();
      load_half(kHalf);
      transpose_square<Of>(steps);
    }
    Of* const target = steps_[vector / 2] + block * kLanes<Of> * kWidth + vector % 2 * kLanes<Of>;
#pragma GCC unroll 8
    for (int i = 0; i < kLanes<Of>; ++i) store_vector<Of>(target + i * kWidth, steps[i]);
  }

  // One of kVectors vectors of columns of a step.
  MAXMOE_INLINE Vector<Of> operator()(int vector, int64_t step) const {
    return load_vector(steps_[vector / 2] + step * kWidth + vector % 2 * kLanes<Of>);
  }

 private:
  alignas(kCacheLineBytes) Of steps_[kPanels][kDepth / kDepthPerStep<Of> * kWidth];
};

// The sums of kRows rows and kPanels * NR columns.
template <class S, int kRows, int kPanels>
using PartSums = Accumulators<S, kRows, 2 * kPanels>;

// Adds the products of one step of a part to the sums. `a` begins with the first step of the part.
template <bool kHasSecond, class T, class Element, int kRows, int kPanels>
MAXMOE_INLINE void multiply_step(SkinnyRows<Element, kRows> a, const TransposedPart<T, Element, kPanels>& b,
                                 int64_t step, PartSums<Accumulator<T>, kRows, kPanels>& sums) {
  using Of = BlockElement<T, Element>;
  const int64_t k = step * kStepsPerBlockStep<T, Element>;
  // One panel after the other: their vectors and the accumulators of two rows fit into 16 registers.
#pragma GCC unroll 2
  for (int panel = 0; panel < kPanels; ++panel) {
    const auto multiply = [&](int64_t step_of_a, auto even, auto odd) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        Vector<Accumulator<T>>(&sum)[2 * kPanels] = sums.of[r];
        const Element factor = a(r, step_of_a);
        sum[2 * panel] = multiply_add(sum[2 * panel], factor, std::bit_cast<Vector<Element>>(even));
        sum[2 * panel + 1] = multiply_add(sum[2 * panel + 1], factor, std::bit_cast<Vector<Element>>(odd));
      }
    };
    const Vector<Of> even = b(2 * panel, step);
    const Vector<Of> odd = b(2 * panel + 1, step);
    if constexpr (std::is_same_v<Element, Of>) {
      multiply(k, even, odd);
    } else {
      multiply(k, even << 16, odd << 16);
      if constexpr (kHasSecond) multiply(k + 1, even & 0xffff0000U, odd & 0xffff0000U);
    }
  }
}

// The columns to prefetch: the ones after the current columns, at the end of b the first ones of the next product.
// Without a next product this is memory past the end of b. A prefetch never faults.
template <class T>
MAXMOE_INLINE ConstMatrixView<T> columns_to_prefetch(ConstMatrixView<T> after, ConstMatrixView<T> next_memory) {
  return after.rows > 0 || next_memory.rows == 0 ? after : next_memory;
}

// Prefetches the cache lines of columns, the rows of a matrix, into the second-level cache in the order of memory.
// Unlike BlockPrefetch it does not count them, and goes on past the last one.
class ColumnPrefetch {
 public:
  template <class T>
  MAXMOE_INLINE explicit ColumnPrefetch(ConstMatrixView<T> columns)
      : column_bytes_(columns.columns * int64_t{sizeof(T)}),
        gap_(columns.row_stride * int64_t{sizeof(T)} - column_bytes_),
        line_(reinterpret_cast<const std::byte*>(columns.data)),
        end_(line_ + column_bytes_) {}

  template <int kLines>
  MAXMOE_INLINE void advance() {
#pragma GCC unroll 4
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(line_ + i * kCacheLineBytes, /*write*/ 0, /*locality: L2*/ 2);
    line_ += kLines * kCacheLineBytes;
    if (line_ < end_) return;
    line_ += gap_;
    end_ += column_bytes_ + gap_;
  }

 private:
  int64_t column_bytes_;
  int64_t gap_;
  const std::byte* line_;
  const std::byte* end_;
};

// Adds the products of a and the first `depth` elements of a part to the sums. `a` begins with the first step of the
// part. Groups of rows prefetch in turn: the steps are divided into `count` shares, and each step of share `index`
// prefetches a cache line of each panel.
template <class T, class Element, int kRows, int kPanels>
MAXMOE_INLINE void multiply_part(SkinnyRows<Element, kRows> a, const TransposedPart<T, Element, kPanels>& b,
                                 int64_t depth, PartSums<Accumulator<T>, kRows, kPanels>& sums,
                                 ColumnPrefetch& prefetch, int64_t index, int64_t count) {
  using Of = BlockElement<T, Element>;
  const int64_t whole_steps = depth / kDepthPerStep<Of>;
  const Range share{whole_steps * index / count, whole_steps * (index + 1) / count};
  int64_t step = 0;
  for (; step < share.begin; ++step) multiply_step<true>(a, b, step, sums);
  for (; step < share.end; ++step) {
    prefetch.advance<kPanels>();
    multiply_step<true>(a, b, step, sums);
  }
  for (; step < whole_steps; ++step) multiply_step<true>(a, b, step, sums);
  if (step < steps_of_depth<Of>(depth)) multiply_step<false>(a, b, step, sums);
}

// Adds the products of a and a whole part to the sums. Meanwhile a whole part is transposed: `next`, from depth d of
// `columns` on.
template <class T, class Element, int kRows, int kPanels>
MAXMOE_INLINE void multiply_and_transpose(SkinnyRows<Element, kRows> a, const TransposedPart<T, Element, kPanels>& b,
                                          PartSums<Accumulator<T>, kRows, kPanels>& sums,
                                          TransposedPart<T, Element, kPanels>& next, ConstMatrixView<T> columns,
                                          int64_t d, ColumnPrefetch& prefetch) {
  using Part = TransposedPart<T, Element, kPanels>;
  constexpr int kBlocks = Part::kBlocksPerLine * Part::kVectors;  // blocks per cache line of each column
  constexpr int kSteps = static_cast<int>(Part::kDepthOfLine / kDepthPerStep<typename Part::Of>) / kBlocks;
  // Half a block and the accumulators of more than two rows need more than 16 registers.
  constexpr int kStepsHalfway = kRows <= 2 ? kSteps / 2 : 0;
  constexpr int kLines = kPanels * kNR<Accumulator<T>> / kBlocks;
  static_assert(kSteps * kBlocks * kDepthPerStep<typename Part::Of> == Part::kDepthOfLine);
  int64_t step = 0;
  const auto multiply = [&]<int kCount>() MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 8
    for (int i = 0; i < kCount; ++i) multiply_step<true>(a, b, step++, sums);
  };
  // All blocks of a cache line before the next vector: columns a power of two apart share a set of the first-level
  // cache.
  for (int line = 0; line < 2; ++line) {
    for (int vector = 0; vector < Part::kVectors; ++vector) {
#pragma GCC unroll 4
      for (int block = 0; block < Part::kBlocksPerLine; ++block) {
        next.transpose_block(columns, d, vector, line * Part::kBlocksPerLine + block,
                             [&]() MAXMOE_INLINE_LAMBDA { multiply.template operator()<kStepsHalfway>(); });
        prefetch.advance<kLines>();
        multiply.template operator()<kSteps - kStepsHalfway>();
      }
    }
  }
}

// Computes sums = a * b, or += if `accumulate`, for one group of rows, kPanels * NR columns at a time. The columns are
// the rows of `memory`. The columns in `next_memory` are prefetched at the end.
template <class T, class Element, int kRows, int kPanels>
MAXMOE_INLINE void multiply_group_in_parts(SkinnyRows<Element, kRows> a, ConstMatrixView<T> memory,
                                           ConstMatrixView<T> next_memory, MatrixView<Accumulator<T>> sums,
                                           bool accumulate) {
  using Part = TransposedPart<T, Element, kPanels>;
  constexpr int64_t kColumns = kPanels * kNR<Accumulator<T>>;
  Part parts[2];
  int current = 0;
  if (memory.rows > 0) parts[0].transpose(memory, 0);
  for (int64_t column = 0; column < memory.rows; column += kColumns) {
    const ConstMatrixView<T> columns = memory.row_range(column, memory.rows);
    const ConstMatrixView<T> after = memory.row_range(column + kColumns, memory.rows);
    ColumnPrefetch prefetch(columns_to_prefetch(after, next_memory));
    const MatrixView<Accumulator<T>> of_columns = sums.column_range(column, column + kColumns);
    PartSums<Accumulator<T>, kRows, kPanels> of_group(of_columns.data, of_columns.row_stride, accumulate);
    for (int64_t d = 0; d < memory.columns; d += Part::kDepth, current = 1 - current) {
      const SkinnyRows<Element, kRows> of_part{a.data + d / kDepthPerStep<Element> * kRows};
      // The next part is of the same columns, or the first part of the next columns.
      const bool is_last = d + Part::kDepth >= memory.columns;
      const ConstMatrixView<T>& of_next = is_last ? after : columns;
      const int64_t next_d = is_last ? 0 : d + Part::kDepth;
      const bool both_are_whole = (is_last ? d : next_d) + Part::kDepth <= memory.columns;
      if (both_are_whole && of_next.rows > 0) {
        multiply_and_transpose(of_part, parts[current], of_group, parts[1 - current], of_next, next_d, prefetch);
      } else {
        multiply_part(of_part, parts[current], at_most(Part::kDepth, memory.columns - d), of_group, prefetch, 0, 1);
        if (of_next.rows > 0) parts[1 - current].transpose(of_next, next_d);
      }
    }
    of_group.store(of_columns.data, of_columns.row_stride);
  }
}

// The same for several groups, NR columns at a time.
template <class T, class Element>
void multiply_groups_in_parts(const RowGroups<Element>& a, ConstMatrixView<T> memory, ConstMatrixView<T> next_memory,
                              MatrixView<Accumulator<T>> sums, bool accumulate) {
  using Part = TransposedPart<T, Element, 1>;
  constexpr int64_t kColumns = kNR<Accumulator<T>>;
  for (int64_t column = 0; column < memory.rows; column += kColumns) {
    const ConstMatrixView<T> after = memory.row_range(column + kColumns, memory.rows);
    ColumnPrefetch prefetch(columns_to_prefetch(after, next_memory));
    for (int64_t d = 0; d < memory.columns; d += Part::kDepth) {
      Part part;
      part.transpose(memory.row_range(column, memory.rows), d);
      for (int64_t i = 0; i < a.count(); ++i) {
        const RowGroup<Element> group = a[i];
        const MatrixView<Accumulator<T>> of_columns =
            sums.row_range(group.rows.begin, group.rows.end).column_range(column, column + kColumns);
        with_number_of_rows(group.rows.size(), [&]<int kRows> {
          const SkinnyRows<Element, kRows> of_part{group.steps + d / kDepthPerStep<Element> * kRows};
          PartSums<Accumulator<T>, kRows, 1> of_group(of_columns.data, of_columns.row_stride, accumulate || d > 0);
          multiply_part(of_part, part, at_most(Part::kDepth, memory.columns - d), of_group, prefetch, i, a.count());
          of_group.store(of_columns.data, of_columns.row_stride);
        });
      }
    }
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
