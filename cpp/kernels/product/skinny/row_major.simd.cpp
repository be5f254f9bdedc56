// The skinny product with a row-major B: skinny_product.simd.h.
//
// The loops over columns and over the inner dimension are exchanged. The outer loop runs over blocks of rows of B, the
// inner one over all columns. While a block is multiplied, the next one is prefetched in the order of memory, which
// hardware prefetchers follow and which has the fewest TLB misses. The partial sums of C are loaded and stored once per
// block. C has few rows, so that its sums stay in the first- or second-level cache.
//
// With more than 12 rows the loads and stores of sums take a large part of the time. A wide B is then multiplied in
// ranges of columns, whose blocks have more rows.
#include "kernels/product/accumulators.simd.h"
#include "kernels/product/skinny/skinny_product.simd.h"
#include "kernels/product/tiled/blocking.simd.h"
#include "kernels/product/tiled/micro_kernel.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Number of rows of a block of a row-major B. It is even, so that only the last block of B can end within a pair.
//
// While a block is multiplied, the next one is prefetched into the second-level cache, in the order of memory: into the
// first-level cache it took up to 1.6 times the time. Blocks of 32 KiB are best for up to 4 rows of A. With more rows
// the partial sums, which are loaded and stored once per block, are a larger share of the time, and 96 KiB took 0.7 to
// 0.9 of it (docs/concepts/kernels.md).
MAXMOE_INLINE int64_t rows_of_block(int64_t num_rows, int64_t row_bytes) {
  constexpr int64_t kMinDepth = 8;
  const bool is_small = num_rows <= 4;
  const int64_t block_bytes = int64_t{is_small ? 32 : 96} * 1024;
  const int64_t max_depth = is_small ? 64 : 256;
  const int64_t depth = block_bytes / row_bytes / 2 * 2;
  return depth < kMinDepth ? kMinDepth : at_most(depth, max_depth);
}

// Addresses that are prefetched while the columns of a block are multiplied: kLines cache lines for each row.
struct RowPrefetch {
  const std::byte* address;
  int64_t row_bytes;  // from one row to the next

  template <int kLines>
  MAXMOE_INLINE void advance() {
#pragma GCC unroll 8
    for (int i = 0; i < kLines; ++i) __builtin_prefetch(address + i * kCacheLineBytes, /*write*/ 0, /*locality: L2*/ 2);
    address += row_bytes;
  }
};

// Number of columns that one of several groups prefetches before it is the next one's turn.
template <class T>
constexpr int64_t kColumnsOfTurn = 2 * kNR<Accumulator<T>>;

// Computes sums[kRows, kVectorsX2 * NR] = a * b, or += if `accumulate`, for one block of rows of B. The columns of the
// sums are in the order of VectorX2.
template <class T, class Element, int kRows, int kVectorsX2>
MAXMOE_INLINE void multiply_skinny_block(SkinnyRows<Element, kRows> a, ConstMatrixView<T> b, Range depth,
                                         Accumulator<T>* sums, int64_t sums_stride, bool accumulate, RowPrefetch next) {
  using S = Accumulator<T>;
  constexpr int kDepthOfStep = kDepthPerStep<Element>;
  // Where a kernel reads half a line, it is prefetched twice.
  constexpr int kLines = kLinesPerRow<T, kVectorsX2> == 0 ? 1 : kLinesPerRow<T, kVectorsX2>;
  Accumulators<S, kRows, 2 * kVectorsX2> sum(sums, sums_stride, accumulate);
  // A missing second row of a step of pairs counts as zeros.
  const auto multiply_step = [&]<bool kHasSecond>(int64_t d, const T* row) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 4
    for (int v = 0; v < kVectorsX2; ++v) {
      const T* const first = row + v * kNR<S>;
      const StepX2<Element> step = load_step<Element>(first, kHasSecond ? first + b.row_stride : nullptr);
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) {
        const Element factor = a(r, d / kDepthOfStep);
        sum.of[r][2 * v] = multiply_add(sum.of[r][2 * v], factor, step.first);
        sum.of[r][2 * v + 1] = multiply_add(sum.of[r][2 * v + 1], factor, step.second);
      }
    }
  };
  int64_t d = depth.begin;
  const T* row = b.row(d);
  for (; d + kDepthOfStep <= depth.end; d += kDepthOfStep, row += kDepthOfStep * b.row_stride) {
#pragma GCC unroll 2
    for (int i = 0; i < kDepthOfStep; ++i) next.advance<kLines>();
    multiply_step.template operator()<true>(d, row);
  }
  if (d < depth.end) multiply_step.template operator()<false>(d, row);
  sum.store(sums, sums_stride);
}

// Multiplies a group of rows with all columns of one block of rows of B, and prefetches the group's share of `next`,
// the next block.
template <class T, class Element, int kRows>
MAXMOE_INLINE void multiply_skinny_columns(const RowGroup<Element>& group, ConstMatrixView<T> b, Range depth,
                                           MatrixView<Accumulator<T>> sums, bool accumulate, ConstMatrixView<T> next) {
  // 3 rows of bfloat16 that become floats have a register too few for two VectorX2.
  constexpr bool kWidens = std::is_same_v<T, BFloat16> && kDepthPerStep<Element> == 1 && kVectorRegisters == 16;
  constexpr int kWideX2 = kWidens && kRows == 3 ? 1 : vectors_x2_of_rows(kRows);
  constexpr int64_t kWideColumns = kWideX2 * kNR<Accumulator<T>>;
  const bool is_contiguous = next.row_stride == next.columns;
  int64_t column = 0;
  const auto multiply_columns = [&]<int kVectorsX2> {
    constexpr int64_t kColumns = kVectorsX2 * kNR<Accumulator<T>>;
    const T* first = next.data + (is_contiguous ? column * depth.size() : column);
    RowPrefetch of_columns{reinterpret_cast<const std::byte*>(first),
                           (is_contiguous ? kColumns : next.row_stride) * int64_t{sizeof(T)}};
    // Where it is not the group's turn, a line that is in the cache is prefetched: that costs less than a branch.
    if (kMaxRowsInPlace > kMaxRowsOfGroup && group.count > 1 &&
        column / kColumnsOfTurn<T> % group.count != group.index) {
      of_columns = {reinterpret_cast<const std::byte*>(group.steps), 0};
    }
    multiply_skinny_block<T, Element, kRows, kVectorsX2>(SkinnyRows<Element, kRows>{group.steps},
                                                         b.column_range(column, column + kColumns), depth,
                                                         sums.data + column, sums.row_stride, accumulate, of_columns);
    column += kColumns;
  };
  while (column + kWideColumns <= b.columns) multiply_columns.template operator()<kWideX2>();
  while (column < b.columns) multiply_columns.template operator()<1>();
}

// Calls body(depth, next) for the blocks of rows of b that `num_rows` rows multiply. `next` is the block that is
// prefetched: the next one of b, after the last one the first block of the next product, or `depth` again if there is
// no next product.
template <class T, class Body>
MAXMOE_INLINE void for_blocks_of_rows(int64_t num_rows, ConstMatrixView<T> b, ConstMatrixView<T> next_b,
                                      const Body& body) {
  const int64_t rows_per_block = rows_of_block(num_rows, b.columns * int64_t{sizeof(T)});
  for (int64_t d = 0; d < b.rows; d += rows_per_block) {
    const Range depth = range_from(d, rows_per_block, b.rows);
    const ConstMatrixView<T> after_b = next_b.rows > 0 ? next_b : b.row_range(d, b.rows);
    body(depth, depth.end < b.rows ? b.row_range(depth.end, b.rows) : after_b);
  }
}

// Multiplies a group of rows with `block` of the rows of b, or with all blocks if it is null, one after the other. Not
// inlined, once per number of rows: in one common function the compiler keeps fewer accumulators in registers.
template <class T, class Element, int kRows>
__attribute__((noinline)) void multiply_skinny_group(const RowGroup<Element>& group, ConstMatrixView<T> b,
                                                     MatrixView<Accumulator<T>> sums, bool accumulate,
                                                     ConstMatrixView<T> next_b, const Range* block) {
  const MatrixView<Accumulator<T>> rows = sums.row_range(group.rows.begin, group.rows.end);
  const auto multiply = [&](Range depth, ConstMatrixView<T> next) MAXMOE_INLINE_LAMBDA {
    multiply_skinny_columns<T, Element, kRows>(group, b, depth, rows, accumulate || depth.begin > 0, next);
  };
  if (block != nullptr) {
    multiply(*block, next_b);
  } else {
    for_blocks_of_rows<T>(kRows, b, next_b, multiply);
  }
}

// The product with a range of columns of a row-major b. One group runs through all blocks of rows of b by itself, so
// that its kernel is chosen once.
template <class T, class Element>
void multiply_range_of_columns(const RowGroups<Element>& a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> sums,
                               bool accumulate, ConstMatrixView<T> next_b) {
  const auto multiply_group = [&](int64_t index, ConstMatrixView<T> next, const Range* block) {
    const RowGroup<Element> group = a[index];
    with_number_of_rows(group.rows.size(), [&]<int kRows> {
      multiply_skinny_group<T, Element, kRows>(group, b, sums, accumulate, next, block);
    });
  };
  if (a.count() == 1) return multiply_group(0, next_b, nullptr);
  for_blocks_of_rows<T>(a.num_rows, b, next_b, [&](Range depth, ConstMatrixView<T> next) {
    for (int64_t i = 0; i < a.count(); ++i) multiply_group(i, next, &depth);
  });
}

// Number of columns of a range. With more than 12 rows of A a row of it takes at most 2 KiB, so that a block has 48
// rows or more: with all of 2880 columns of float32 in a range 24 rows took 1.4 times the time.
template <class T>
int64_t columns_of_range(int64_t num_rows, int64_t num_columns) {
  constexpr int64_t kMaxColumns = int64_t{2048} / int64_t{sizeof(T)};
  if (num_rows <= kMaxRowsInPlace || num_columns <= kMaxColumns) return num_columns;
  const int64_t num_ranges = (num_columns + kMaxColumns - 1) / kMaxColumns;
  const int64_t width = (num_columns + num_ranges - 1) / num_ranges;
  return (width + kColumnsOfTurn<T> - 1) / kColumnsOfTurn<T> * kColumnsOfTurn<T>;
}

// The product with a row-major b, range by range of its columns.
template <class T, class Element>
void multiply_skinny_row_major(const RowGroups<Element>& a, ConstMatrixView<T> b, MatrixView<Accumulator<T>> sums,
                               bool accumulate, ConstMatrixView<T> next_b) {
  const int64_t width = columns_of_range<T>(a.num_rows, b.columns);
  for (int64_t column = 0; column < b.columns; column += width) {
    const Range columns = range_from(column, width, b.columns);
    const ConstMatrixView<T> after = b.column_range(columns.end, b.columns);
    multiply_range_of_columns<T, Element>(
        a, b.column_range(columns.begin, columns.end), sums.column_range(columns.begin, columns.end), accumulate,
        after.columns > 0 ? after : next_b.column_range(0, at_most(width, next_b.columns)));
  }
}

#define MAXMOE_INSTANTIATE_FOR(T)                                                             \
  template void multiply_skinny_row_major(const RowGroups<ElementOf<T>>&, ConstMatrixView<T>, \
                                          MatrixView<Accumulator<T>>, bool, ConstMatrixView<T>);

MAXMOE_FOR_EACH_TYPE(MAXMOE_INSTANTIATE_FOR)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
