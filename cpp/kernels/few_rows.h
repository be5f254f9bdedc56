// The product of few rows of A with any B. B is read in place: each of its elements is multiplied with so few elements
// of A that packing it would cost more than it saves. The product is bound by the bandwidth of memory, and each element
// of B is read once. Only for the .cpp files that are compiled per instruction set.
//
// If B is row-major, it is multiplied in blocks of rows (few_row_major_rows.h).
//
// If B is transposed, its columns are rows in memory. As many columns as a vector has lanes are transposed in
// registers, block by block, and multiplied there.
//
// An element of C is the same chain of multiply-adds as in a micro-kernel, so that its bits do not depend on which of
// the two computes it.
#pragma once

#include "few_quantized_rows.h"
#include "few_row_major_rows.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// What a block of a transposed b holds: pairs, if b is bfloat16, even where they are multiplied as floats. A block then
// has twice as many elements, for the same shuffles.
template <class T, class Element>
using BlockElement = std::conditional_t<std::is_same_v<T, BFloat16>, BFloat16Pair, Element>;

// Loads kLanes steps, from column d on, of the rows of `panel` that one vector of a micro-panel holds, and transposes
// them: each vector of `block` is then one step. Prefetches the same block of `next`. The loop is unrolled, so that
// `block` stays in registers; 16 is the largest number of lanes.
template <class T, class Of>
MAXMOE_INLINE void load_transposed_block(ConstMatrixView<T> panel, ConstMatrixView<T> next, int vector, int64_t d,
                                         Vector<Of> (&block)[kLanes<Of>]) {
#pragma GCC unroll 16
  for (int lane = 0; lane < kLanes<Of>; ++lane) {
    const int64_t row = column_of_lane<T>(vector, lane);
    // One line per row: the rows may be pages apart, where hardware prefetchers stop.
    __builtin_prefetch(next.row(row) + d, /*write*/ 0, /*locality: L2*/ 2);
    block[lane] = load_along_depth<Of>(panel.row(row) + d, panel.columns - d);
  }
  transpose_square<Of>(block);
}

// Number of steps of A for one step of a block.
template <class T, class Element>
constexpr int64_t kStepsOfA = kDepthPerStep<BlockElement<T, Element>> / kDepthPerStep<Element>;

// Adds the products with one step of a block, whose first step of A is `step_of_a`. The second element of a pair counts
// if `has_second`.
template <class Element, class Of, int kRows, class S>
MAXMOE_INLINE void multiply_few_rows_step(FewRows<Element, kRows> a, int64_t step_of_a, Vector<Of> step,
                                          bool has_second, S (&sum)[kRows]) {
  const auto multiply = [&](int64_t k, auto values) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) sum[r] = multiply_add(sum[r], a(r, k), values);
  };
  if constexpr (std::is_same_v<Element, Of>) {
    multiply(step_of_a, step);
  } else {
    multiply(step_of_a, std::bit_cast<Vector<Element>>(step << 16));
    if (has_second) multiply(step_of_a + 1, std::bit_cast<Vector<Element>>(step & 0xffff0000U));
  }
}

// Number of vectors of columns of a transposed b that are multiplied at a time. Where a block of bfloat16 is multiplied
// as floats, the chain of multiply-adds of a row is twice as long as the shuffles: few rows of one vector would wait
// for it.
template <class T, class Element, int kRows>
constexpr int kTransposedVectors = !std::is_same_v<Element, BlockElement<T, Element>> && kRows <= 3 ? 2 : 1;

// Computes sums[kRows, kVectors * kLanes] = a * b, or += if `accumulate`, for the vectors of columns of a transposed b
// from `first_vector` on.
template <class T, class Element, int kRows>
MAXMOE_INLINE void multiply_few_rows_vectors(FewRows<Element, kRows> a, ConstMatrixView<T> panel,
                                             ConstMatrixView<T> next, int first_vector, Accumulator<T>* sums,
                                             int64_t sums_stride, bool accumulate) {
  using S = Accumulator<T>;
  using Of = BlockElement<T, Element>;
  constexpr int kVectors = kTransposedVectors<T, Element, kRows>;
  constexpr int64_t kDepth = kLanes<Of> * kDepthPerStep<Of>;
  Vector<S> sum[kVectors][kRows];
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      sum[v][r] = accumulate ? load_vector(sums + r * sums_stride + v * kLanes<S>) : Vector<S>{};
    }
  }
  for (int64_t d = 0; d < panel.columns; d += kDepth) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      Vector<Of> block[kLanes<Of>];
      load_transposed_block<T, Of>(panel, next, first_vector + v, d, block);
      // Unrolled for whole blocks, so that the vectors of `block` stay in registers. Only the last block may be
      // shorter.
      const int64_t step_of_a = d / kDepthPerStep<Element>;
      if (d + kDepth <= panel.columns) {
#pragma GCC unroll 16
        for (int step = 0; step < kLanes<Of>; ++step) {
          multiply_few_rows_step<Element, Of>(a, step_of_a + step * kStepsOfA<T, Element>, block[step], true, sum[v]);
        }
      } else {
        for (int64_t step = 0; step < steps_of_depth<Of>(panel.columns - d); ++step) {
          multiply_few_rows_step<Element, Of>(a, step_of_a + step * kStepsOfA<T, Element>, block[step],
                                              d + 2 * step + 1 < panel.columns, sum[v]);
        }
      }
    }
  }
#pragma GCC unroll 2
  for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) store_vector<S>(sums + r * sums_stride + v * kLanes<S>, sum[v][r]);
  }
}

// The product with a transposed b, whose columns are the rows of `memory`. While NR columns are multiplied, the next NR
// are prefetched. At the end of b, the first columns of the next product are prefetched.
template <class T, class Element, int kRows>
void multiply_few_rows_transposed(FewRows<Element, kRows> a, ConstMatrixView<T> memory, MatrixView<Accumulator<T>> sums,
                                  bool accumulate, ConstMatrixView<T> next_memory) {
  using S = Accumulator<T>;
  for (int64_t first = 0; first < memory.rows; first += kNR<S>) {
    const ConstMatrixView<T> panel = memory.row_range(first, memory.rows);
    // Without a next product this is memory past the end of b. A prefetch never faults.
    const bool is_last = first + kNR<S> >= memory.rows && next_memory.rows >= kNR<S>;
    const ConstMatrixView<T> next = is_last ? next_memory : memory.row_range(first + kNR<S>, memory.rows);
#pragma GCC unroll 2
    for (int vector = 0; vector < 2; vector += kTransposedVectors<T, Element, kRows>) {
      S* const of_vector = sums.data + first + vector * kLanes<S>;
      multiply_few_rows_vectors<T, Element, kRows>(a, panel, next, vector, of_vector, sums.row_stride, accumulate);
    }
  }
}

// Calls the kernel whose kRows is the number of rows of `sums`.
template <class T, class Element, int... kIndex>
void multiply_few_rows(const Element* a, const Product<T>& p, MatrixView<Accumulator<T>> sums, bool accumulate,
                       std::integer_sequence<int, kIndex...> /*indices*/) {
  const ConstMatrixView<T> next = p.next_b.is_quantized() ? ConstMatrixView<T>{} : p.next_b.memory;
  const auto multiply = [&]<int kRows> {
    const FewRows<Element, kRows> rows{a};
    if (p.b.is_quantized()) {
      multiply_few_rows_quantized<T, Element, kRows>(rows, p.b, p.next_b, sums, accumulate);
    } else if (p.b.is_transposed) {
      multiply_few_rows_transposed<T, Element, kRows>(rows, p.b.memory, sums, accumulate, next);
    } else {
      multiply_few_rows_row_major<T, Element, kRows>(rows, p.b.memory, sums, accumulate, next);
    }
    return true;
  };
  static_cast<void>(((sums.rows == kIndex + 1 && multiply.template operator()<kIndex + 1>()) || ...));
}

// Loads kLanes steps of one row of A, from depth d on.
template <class Element, class T>
MAXMOE_INLINE Vector<Element> load_row_of_a(const GemmOperand<T>& a, int64_t row, int64_t d) {
  constexpr int64_t kDepth = kLanes<Element> * kDepthPerStep<Element>;
  const int64_t depth = a.columns() - d;
  if (!a.is_transposed) return load_along_depth<Element>(a.memory_row(row) + d, depth);
  // The row is a column in memory. Its elements are copied one by one, which takes little time for few rows of A.
  T elements[kDepth];
  for (int64_t i = 0; i < at_most(kDepth, depth); ++i) elements[i] = a.memory_row(d + i)[row];
  return load_along_depth<Element>(elements, depth);
}

// The stride of rows of `size` elements that are read at the same time: an odd number of cache lines, so that they do
// not share a few sets of the first-level cache.
template <class Element>
constexpr int64_t padded_stride(int64_t size) {
  const int64_t lines = (size * int64_t{sizeof(Element)} + kCacheLineBytes - 1) / kCacheLineBytes;
  return (lines | 1) * kCacheLineElements<Element>;
}

// Lane kFirst of `a`, then of `b`, then the next lane of both, and so on.
template <int kFirst, class V, int... kLane>
MAXMOE_INLINE V zipped(V a, V b, std::integer_sequence<int, kLane...> /*lanes*/) {
  return __builtin_shufflevector(a, b, (kFirst + kLane / 2 + kLane % 2 * static_cast<int>(sizeof...(kLane)))...);
}

template <int kFirst, class V>
MAXMOE_INLINE V zipped(V a, V b) {
  return zipped<kFirst>(a, b, std::make_integer_sequence<int, sizeof(V) / sizeof(a[0])>());
}

// Computes sums = a * b, or += if `accumulate`, for 1 to kMaxFewRows rows. Of `p`, b and next_b are read. If
// `is_packed`, the call before has packed the same a.
template <class Element, class T>
void add_few_rows(const GemmOperand<T>& a, bool is_packed, const Product<T>& p, MatrixView<Accumulator<T>> sums,
                  bool accumulate) {
  constexpr std::make_integer_sequence<int, kMaxFewRows> kIndices;
  const int64_t num_steps = steps_of_depth<Element>(a.columns());
  // A is stored in the slot of packed B, which is free here. One vector is added because whole vectors are stored.
  Element* const rows = scratch<Element>(kPackedBScratch, sums.rows * (num_steps + kLanes<Element>));
  Element part[kLanes<Element>];
  for (int64_t k = is_packed ? num_steps : 0; k < num_steps; k += kLanes<Element>) {
    Element* const target = rows + k * sums.rows;
    for (int64_t r = 0; r < sums.rows; ++r) {
      const Vector<Element> steps = load_row_of_a<Element>(a, r, k * kDepthPerStep<Element>);
      if (sums.rows == 1) {
        store_vector(target, steps);
      } else if (sums.rows == 2 && r == 0) {
        const Vector<Element> second = load_row_of_a<Element>(a, 1, k * kDepthPerStep<Element>);
        store_vector(target, zipped<0>(steps, second));
        store_vector(target + kLanes<Element>, zipped<kLanes<Element> / 2>(steps, second));
        break;
      } else {
        store_vector(static_cast<Element*>(part), steps);
        for (int step = 0; step < kLanes<Element>; ++step) target[step * sums.rows + r] = part[step];
      }
    }
  }
  multiply_few_rows<T>(rows, p, sums, accumulate, kIndices);
}

// A product with 1 to kMaxFewRows rows. b has no index, a multiple of NR columns, and at least one row.
template <class Element, class T>
void multiply_few_rows(const GemmOperand<T>& a, bool is_packed, const Product<T>& p) {
  using S = Accumulator<T>;
  const MatrixView<T>& c = p.c;
  // The sums are not kept in c: rounding them to T after each block of rows of B would change the result.
  const int64_t stride = padded_stride<S>(c.columns);
  const MatrixView<S> sums{scratch<S>(kSumsScratch, c.rows * stride), c.rows, c.columns, stride};
  for (int64_t r = 0; r < c.rows && p.accumulate; ++r) {
    for (int64_t column = 0; column < c.columns; column += kNR<S>) {
      store_narrowed_x2<S>(sums.row(r) + column, load_x2(c.row(r) + column));
    }
  }
  add_few_rows<Element>(a, is_packed, p, sums, p.accumulate);
  if (p.has_low_rank_term()) {
    add_few_rows<Element>(GemmOperand<T>(p.reduced), false, Product<T>{p.expand}, sums, true);
  }
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t column = 0; column < c.columns; column += kNR<S>) {
      const S* of_row = sums.row(r) + column;
      store_narrowed_x2<T>(c.row(r) + column, {load_vector(of_row), load_vector(of_row + kLanes<S>)});
    }
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
