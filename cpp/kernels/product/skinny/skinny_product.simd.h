// The skinny product: few rows of A with any B. B is read in place: each of its elements is multiplied with so few
// elements of A that packing it would cost more than it saves. The product is bound by the bandwidth of memory, and
// each element of B is read once.
//
// If B is row-major, it is multiplied in blocks of rows (row_major.simd.cpp). If it is transposed, its columns
// are rows in memory, which are transposed in registers (transposed.simd.cpp). If it is quantized, it is decoded on
// the way (quantized.simd.cpp).
//
// An element of C is the same chain of multiply-adds as in a micro-kernel, so that its bits do not depend on which of
// the two computes it.
#pragma once

#include "kernels/executor.h"
#include "kernels/product/gemm.h"
#include "kernels/product/skinny/quantized.simd.h"
#include "kernels/product/skinny/row_groups.simd.h"
#include "kernels/product/tiled/pack.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The next three functions compute sums = a * b, or += if `accumulate`. At the end of b the begin of next_b, which may
// be empty, is prefetched; of quantized values only where they are multiplied as they are decoded.
template <class T, class Element>
void multiply_skinny_row_major(const RowGroups<Element>& a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> sums,
                               bool accumulate, ConstMatrixView<T> next_b);

// The columns of b are the rows of `memory`.
template <class T, class Element>
void multiply_skinny_transposed(const RowGroups<Element>& a, ConstMatrixView<T> memory, MatrixView<Accumulator<T>> sums,
                                bool accumulate, ConstMatrixView<T> next_memory);

template <class T, class Element>
void multiply_skinny_quantized(const RowGroups<Element>& a, const GemmOperand<T>& b, const GemmOperand<T>& next_b,
                               MatrixView<Accumulator<T>> sums, bool accumulate);

// Multiplies the rows with b of `p`, which is quantized, transposed or row-major.
template <class T, class Element>
void multiply_skinny(const RowGroups<Element>& a, const Product<T>& p, MatrixView<Accumulator<T>> sums,
                     bool accumulate) {
  const ConstMatrixView<T> next = p.next_b.is_quantized() ? ConstMatrixView<T>{} : p.next_b.memory;
  if (p.b.is_quantized()) {
    multiply_skinny_quantized<T, Element>(a, p.b, p.next_b, sums, accumulate);
  } else if (p.b.is_transposed) {
    multiply_skinny_transposed<T, Element>(a, p.b.memory, sums, accumulate, next);
  } else {
    multiply_skinny_row_major<T, Element>(a, p.b.memory, sums, accumulate, next);
  }
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

// Lane kFirst of `a`, then of `b`, then the next lane of both, and so on.
template <int kFirst, class V, int... kLane>
MAXMOE_INLINE V zipped(V a, V b, std::integer_sequence<int, kLane...> /*lanes*/) {
  return __builtin_shufflevector(a, b, (kFirst + kLane / 2 + kLane % 2 * static_cast<int>(sizeof...(kLane)))...);
}

template <int kFirst, class V>
MAXMOE_INLINE V zipped(V a, V b) {
  return zipped<kFirst>(a, b, std::make_integer_sequence<int, sizeof(V) / sizeof(a[0])>());
}

// Stores a group of rows of A, step by step. Whole vectors are stored, so that up to one vector per row is written past
// the last step.
template <class Element, class T>
void store_rows_of_a(const GemmOperand<T>& a, Range rows, Element* steps) {
  const int64_t num_steps = steps_of_depth<Element>(a.columns());
  const int64_t count = rows.size();
  if (!a.is_transposed && count > 2) {
    return with_number_of_rows(count, [&]<int kRows> {
      pack_along_depth<Element, kRows>(a, rows, {0, a.columns()}, [](int i) { return i; }, steps);
    });
  }
  Element part[kLanes<Element>];
  for (int64_t k = 0; k < num_steps; k += kLanes<Element>) {
    Element* const target = steps + k * count;
    for (int64_t r = 0; r < count; ++r) {
      const Vector<Element> vector = load_row_of_a<Element>(a, rows.begin + r, k * kDepthPerStep<Element>);
      if (count == 1) {
        store_vector(target, vector);
      } else if (count == 2 && r == 0) {
        const Vector<Element> second = load_row_of_a<Element>(a, rows.begin + 1, k * kDepthPerStep<Element>);
        store_vector(target, zipped<0>(vector, second));
        store_vector(target + kLanes<Element>, zipped<kLanes<Element> / 2>(vector, second));
        break;
      } else {
        store_vector(static_cast<Element*>(part), vector);
        for (int step = 0; step < kLanes<Element>; ++step) target[step * count + r] = part[step];
      }
    }
  }
}

// The largest number of rows of a group, if `num_rows` rows multiply b.
template <class Element, class T>
int64_t max_group_of(const GemmOperand<T>& b, int64_t num_rows) {
  // The accumulators of 5 rows fit into 16 registers beside pairs that are multiplied as floats.
  constexpr int64_t kMaxRowsOfPairs = 5;
  const bool has_pairs_as_floats = b.is_transposed && !std::is_same_v<Element, BlockElement<T, Element>>;
  return has_pairs_as_floats && num_rows > kMaxRowsOfGroup ? kMaxRowsOfPairs : kMaxRowsOfGroup;
}

// Number of whole cache lines of a row of a row-major b that a kernel reads at a time: 0 if it reads half a line.
template <class T, int kVectorsX2>
constexpr int kLinesPerRow =
    static_cast<int>(kVectorsX2 * kLanesX2<Accumulator<T>> * int64_t{sizeof(T)} / kCacheLineBytes);

// The largest number of rows that are multiplied with b in place.
//
// With 16 registers these are up to 24 for a row-major b, which took up to 1.6 times the time with packed b. An
// exception is a b of which a kernel reads half a cache line per row at a time: if rows are a multiple of 2 KiB apart,
// the lines share few sets of the first-level cache, and are evicted before the other half is read
// (docs/concepts/kernels.md).
template <class Element, class T>
int64_t max_rows_in_place(const GemmOperand<T>& b) {
#if MAXMOE_DECODES_PAIRS
  if (b.is_quantized() && std::is_same_v<Element, BFloat16Pair>) return kMaxVnniRows;
#endif
  if (b.is_quantized() || b.is_transposed || kVectorRegisters == 32) return kMaxRowsInPlace;
  const bool reads_lines_twice = kLinesPerRow<T, 1> == 0 && b.memory.row_stride * int64_t{sizeof(T)} % 2048 == 0;
  return reads_lines_twice ? kMaxRowsInPlace : 2 * kMaxRowsInPlace;
}

// Computes sums = a * b, or += if `accumulate`, for 1 to max_rows_in_place(b) rows. Reads only b and next_b of `p`. The
// previous call has stored the same a in groups of at most `stored_group` rows; 0 if it has not stored a.
template <class Element, class T>
void add_skinny(const GemmOperand<T>& a, int64_t stored_group, const Product<T>& p, MatrixView<Accumulator<T>> sums,
                bool accumulate) {
  // A is stored in the slot of packed B, which is free here. One vector is added to a row because whole vectors are
  // stored.
  const int64_t row_size = steps_of_depth<Element>(a.columns()) + kLanes<Element>;
  const RowGroups<Element> rows{scratch<Element>(kPackedBScratch, sums.rows * row_size), sums.rows, row_size,
                                max_group_of<Element>(p.b, sums.rows)};
  for (int64_t i = 0; i < rows.count() && rows.max_group != stored_group; ++i) {
    store_rows_of_a(a, rows.rows(i), rows.steps(rows.rows(i)));
  }
  multiply_skinny<T, Element>(rows, p, sums, accumulate);
}

// A product with 1 to max_rows_in_place(b) rows. b has no index, a multiple of NR columns, and at least one row.
template <class Element, class T>
void multiply_skinny(const GemmOperand<T>& a, int64_t stored_group, const Product<T>& p) {
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
  add_skinny<Element>(a, stored_group, p, sums, p.accumulate);
  if (p.has_low_rank_term()) {
    add_skinny<Element>(GemmOperand<T>(p.reduced), 0, Product<T>{p.expand}, sums, true);
  }
  for (int64_t r = 0; r < c.rows; ++r) {
    for (int64_t column = 0; column < c.columns; column += kNR<S>) {
      const S* of_row = sums.row(r) + column;
      store_narrowed_x2<T>(c.row(r) + column, {load_vector(of_row), load_vector(of_row + kLanes<S>)});
    }
  }
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
