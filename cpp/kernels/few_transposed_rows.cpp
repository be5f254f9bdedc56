// The product of few rows of A with a transposed B, whose columns are rows in memory: few_rows.h.
//
// As many columns as a vector has lanes are transposed in registers, block by block, and multiplied there. There are
// two cases in which the transposed blocks are stored in the first-level cache instead:
//
// - More than one group of rows multiplies them.
// - There are 16 registers, and pairs of bfloat16 are multiplied as floats. The chain of multiply-adds of a row is then
//   twice as long as the shuffles, and one vector of columns would wait for it; two need more registers.
//
// While some columns are multiplied, the next ones are prefetched, a cache line in each step. All lines of a block at
// once left the multiply-adds waiting, and took up to 1.25 times the time (docs/concepts/kernels.md).
#include "few_transposed_rows.h"

#include "blocking.h"
#include "transposed_steps.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Computes sums[kRows, kLanes] = a * b, or += if `accumulate`, for one vector of columns, whose first block is `block`.
// A cache line of the column in the same lane of `next` is prefetched in each step.
template <class T, class Element, int kRows>
MAXMOE_INLINE void multiply_few_rows_in_registers(FewRows<Element, kRows> a,
                                                  TransposedBlock<BlockElement<T, Element>>& block,
                                                  const ColumnVector<T>& columns, const ColumnVector<T>& following,
                                                  const ColumnVector<T>& next, MatrixView<Accumulator<T>> sums,
                                                  bool accumulate) {
  using S = Accumulator<T>;
  using Of = BlockElement<T, Element>;
  Vector<S> sum[kRows];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) sum[r] = accumulate ? load_vector(sums.row(r)) : Vector<S>{};
  const T* const prefetched = next.column(0);
  const int64_t to_next_lane = next.column(1) - prefetched;
  const auto multiply = [&](int64_t step, bool has_second, Vector<Of> values) MAXMOE_INLINE_LAMBDA {
    const int64_t lane = step % kLanes<Of>;
    __builtin_prefetch(prefetched + lane * to_next_lane + (step - lane) * kDepthPerStep<Of>, /*write*/ 0,
                       /*locality: L2*/ 2);
    const int64_t first = step * kStepsPerBlockStep<T, Element>;
    for_steps_of_elements<Element>(first, has_second, values, [&](int64_t k, auto elements) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) sum[r] = multiply_add(sum[r], a(r, k), elements);
    });
  };
  for_transposed_steps(block, columns, following, multiply);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) store_vector<S>(sums.row(r), sum[r]);
}

// Part of the inner dimension of kPanels * NR columns of b, transposed and stored: two cache lines of each column.
template <class T, class Element, int kPanels>
struct TransposedPart {
  using Of = BlockElement<T, Element>;
  static constexpr int64_t kDepth = 2 * kCacheLineElements<T>;
  static constexpr int kWidth = kNR<Accumulator<T>>;

  alignas(kCacheLineBytes) Of steps[kPanels][kDepth / kDepthPerStep<Of> * kWidth];
  Range depth;

  MAXMOE_INLINE TransposedPart(ConstMatrixView<T> memory, int64_t first)
      : depth(range_from(first, kDepth, memory.columns)) {
    constexpr auto kColumnOf = [](int i) { return column_of_lane<T>(i / kLanes<Of>, i % kLanes<Of>); };
#pragma GCC unroll 2
    for (int64_t i = 0; i < kPanels; ++i) {
      pack_along_depth<Of, kWidth>(GemmOperand<T>(memory), {i * kWidth, (i + 1) * kWidth}, depth, kColumnOf,
                                   static_cast<Of*>(steps[i]));
    }
  }

  // One of 2 * kPanels vectors of columns of a step.
  MAXMOE_INLINE Vector<Of> operator()(int vector, int64_t step) const {
    return load_vector(steps[vector / 2] + step * kWidth + vector % 2 * kLanes<Of>);
  }
};

// Prefetches line `line` of the next columns, of which `next` has as many as a part: first a line of each column, then
// the next one of each. Neighbours at once took longer (docs/concepts/kernels.md).
template <int kColumns, class T>
MAXMOE_INLINE void prefetch_line(ConstMatrixView<T> next, int64_t first, int64_t line) {
  const T* const column = next.row(line % kColumns) + first;
  __builtin_prefetch(column + line / kColumns * kCacheLineElements<T>, /*write*/ 0, /*locality: L2*/ 2);
}

// The accumulators of kRows rows and kPanels * NR columns.
template <class S, int kRows, int kPanels>
struct PartSums {
  static constexpr int kVectors = 2 * kPanels;
  Vector<S> sum[kRows][kVectors];

  MAXMOE_INLINE PartSums(MatrixView<S> sums, bool accumulate) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sum[r][v] = accumulate ? load_vector(sums.row(r) + v * kLanes<S>) : Vector<S>{};
      }
    }
  }
  MAXMOE_INLINE void store(MatrixView<S> sums) const {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) store_vector<S>(sums.row(r) + v * kLanes<S>, sum[r][v]);
    }
  }
};

// Adds the products of a and a part of b to the sums. The lines `prefetched` of the next columns are prefetched, one of
// each panel in a step.
template <class T, class Element, int kRows, int kPanels>
MAXMOE_INLINE void multiply_few_rows_part(FewRows<Element, kRows> a, const TransposedPart<T, Element, kPanels>& b,
                                          PartSums<Accumulator<T>, kRows, kPanels>& sums, ConstMatrixView<T> next,
                                          Range prefetched) {
  using Of = BlockElement<T, Element>;
  const int64_t first_of_a = b.depth.begin / kDepthPerStep<Element>;
  int64_t line = prefetched.begin;
  for (int64_t step = 0; step < steps_of_depth<Of>(b.depth.size()); ++step) {
    const bool has_second = 2 * step + 1 < b.depth.size();
    const int64_t k = first_of_a + step * kStepsPerBlockStep<T, Element>;
    const bool prefetches = line < prefetched.end;
    // One panel after the other: their vectors and the accumulators of two rows fit into 16 registers.
#pragma GCC unroll 2
    for (int panel = 0; panel < kPanels; ++panel) {
      if (prefetches) prefetch_line<kPanels * kNR<Accumulator<T>>>(next, b.depth.begin, line++);
      const auto multiply = [&](int64_t step_of_a, auto even, auto odd) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 12
        for (int r = 0; r < kRows; ++r) {
          Vector<Accumulator<T>>(&sum)[2 * kPanels] = sums.sum[r];
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
        if (has_second) multiply(k + 1, even & 0xffff0000U, odd & 0xffff0000U);
      }
    }
  }
}

// The product of one group of rows with kPanels * NR columns, the first rows of `memory`. The accumulators stay in
// registers from one part to the next.
template <class T, class Element, int kRows, int kPanels>
MAXMOE_INLINE void multiply_few_rows_in_parts(FewRows<Element, kRows> a, ConstMatrixView<T> memory,
                                              ConstMatrixView<T> next, MatrixView<Accumulator<T>> sums,
                                              bool accumulate) {
  using Part = TransposedPart<T, Element, kPanels>;
  PartSums<Accumulator<T>, kRows, kPanels> of_group(sums, accumulate);
  for (int64_t d = 0; d < memory.columns; d += Part::kDepth) {
    const Part part(memory, d);
    multiply_few_rows_part(a, part, of_group, next, {0, 2 * kPanels * kNR<Accumulator<T>>});
  }
  of_group.store(sums);
}

// The product of more than one group with NR columns, the first rows of `memory`.
template <class T, class Element>
MAXMOE_INLINE void multiply_groups_in_parts(const RowGroups<Element>& a, ConstMatrixView<T> memory,
                                            ConstMatrixView<T> next, MatrixView<Accumulator<T>> sums, bool accumulate) {
  using Part = TransposedPart<T, Element, 1>;
  constexpr int64_t kLines = 2 * kNR<Accumulator<T>>;
  for (int64_t d = 0; d < memory.columns; d += Part::kDepth) {
    const Part part(memory, d);
    for (int64_t i = 0; i < a.count(); ++i) {
      const RowGroup<Element> group = a[i];
      const MatrixView<Accumulator<T>> rows = sums.row_range(group.rows.begin, group.rows.end);
      with_number_of_rows(group.rows.size(), [&]<int kRows> {
        PartSums<Accumulator<T>, kRows, 1> of_group(rows, accumulate || d > 0);
        multiply_few_rows_part(FewRows<Element, kRows>{group.steps}, part, of_group, next,
                               {kLines * i / a.count(), kLines * (i + 1) / a.count()});
        of_group.store(rows);
      });
    }
  }
}

// Calls body(columns, next, sums) for kPanels * NR columns at a time, from `first` on, while there are as many. The
// columns are rows of `memory`; `next` begins with those that are multiplied after them, past the end of b with those
// of the next product.
template <int kPanels, class T, class Body>
MAXMOE_INLINE void for_panels(int64_t& first, ConstMatrixView<T> memory, ConstMatrixView<T> next_memory,
                              MatrixView<Accumulator<T>> sums, const Body& body) {
  constexpr int64_t kColumns = kPanels * kNR<Accumulator<T>>;
  for (; first + kColumns <= memory.rows; first += kColumns) {
    // Without a next product this is memory past the end of b. A prefetch never faults.
    const bool is_last = first + kColumns >= memory.rows && next_memory.rows >= kColumns;
    body(memory.row_range(first, memory.rows), is_last ? next_memory : memory.row_range(first + kColumns, memory.rows),
         sums.column_range(first, first + kColumns));
  }
}

// Whether a single group of rows is multiplied with steps in registers.
template <class T, class Element, int kRows>
constexpr bool kIsInRegisters =
    kVectorRegisters == 32 || std::is_same_v<Element, BlockElement<T, Element>> || (kRows > kMaxRowsOfPairs);

// The product of a single group of rows. A function of its own for each number of rows: in a common one the compiler
// keeps fewer steps in registers.
template <class T, class Element, int kRows>
__attribute__((noinline)) void multiply_few_rows_group(FewRows<Element, kRows> a, ConstMatrixView<T> memory,
                                                       MatrixView<Accumulator<T>> sums, bool accumulate,
                                                       ConstMatrixView<T> next_memory) {
  constexpr int64_t kWidth = kNR<Accumulator<T>>;
  constexpr int64_t kHalfWidth = kLanes<Accumulator<T>>;
  int64_t first = 0;
  if constexpr (kIsInRegisters<T, Element, kRows>) {
    auto block = first_block<BlockElement<T, Element>>(ColumnVector<T>{memory, 0});
    const auto multiply = [&](const auto& columns, const auto& next, const auto& out) MAXMOE_INLINE_LAMBDA {
      // At the end of b the first block of `columns` is read once more.
      const auto& following = columns.rows >= 2 * kWidth ? columns.row_range(kWidth, columns.rows) : columns;
      for (int vector = 0; vector < 2; ++vector) {
        multiply_few_rows_in_registers<T, Element, kRows>(
            a, block, {columns, vector}, {vector == 0 ? columns : following, 1 - vector}, {next, vector},
            out.column_range(vector * kHalfWidth, (vector + 1) * kHalfWidth), accumulate);
      }
    };
    for_panels<1>(first, memory, next_memory, sums, multiply);
  } else {
    // One panel has two chains of multiply-adds per row: for one or two rows too few to cover their latency.
    if constexpr (kRows <= 2) {
      for_panels<2>(first, memory, next_memory, sums, [&](const auto& columns, const auto& next, const auto& out) {
        multiply_few_rows_in_parts<T, Element, kRows, 2>(a, columns, next, out, accumulate);
      });
    }
    for_panels<1>(first, memory, next_memory, sums, [&](const auto& columns, const auto& next, const auto& out) {
      multiply_few_rows_in_parts<T, Element, kRows, 1>(a, columns, next, out, accumulate);
    });
  }
}

}  // namespace

// The product with a transposed b, whose columns are the rows of `memory`. At the end of b, the first columns of the
// next product are prefetched.
template <class T, class Element>
void multiply_few_rows_transposed(const RowGroups<Element>& a, ConstMatrixView<T> memory,
                                  MatrixView<Accumulator<T>> sums, bool accumulate, ConstMatrixView<T> next_memory) {
  if (a.count() == 1) {
    return with_number_of_rows(a.num_rows, [&]<int kRows> {
      multiply_few_rows_group(FewRows<Element, kRows>{a[0].steps}, memory, sums, accumulate, next_memory);
    });
  }
  int64_t first = 0;
  for_panels<1>(first, memory, next_memory, sums, [&](const auto& columns, const auto& next, const auto& out) {
    multiply_groups_in_parts<T, Element>(a, columns, next, out, accumulate);
  });
}

#define MAXMOE_INSTANTIATE_FOR(T)                                                                \
  template void multiply_few_rows_transposed(const RowGroups<ElementOf<T>>&, ConstMatrixView<T>, \
                                             MatrixView<Accumulator<T>>, bool, ConstMatrixView<T>);

MAXMOE_FOR_EACH_TYPE(MAXMOE_INSTANTIATE_FOR)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
