// The skinny product with a transposed B, whose columns are rows in memory: skinny_product.simd.h.
//
// One column per lane of a vector: the columns are transposed in registers, block by block, and multiplied there.
// Transposed blocks are stored in the first-level cache instead (transposed_parts.simd.h) if
//
// - more than one group of rows multiplies them, or
// - there are 16 registers, too few for a block beside the accumulators of more than two rows. Pairs of bfloat16 that
//   are multiplied as floats have chains of multiply-adds that are twice as long as the shuffles: then even one row
//   needs more vectors of columns at a time.
//
// While some columns are multiplied in registers, the next ones are prefetched, a cache line in each step. Prefetching
// all lines of a block at once stalled the multiply-adds, and took up to 1.25 times the time
// (docs/concepts/kernels.md).
#include "kernels/product/skinny/skinny_product.simd.h"
#include "kernels/product/skinny/transposed_parts.simd.h"
#include "kernels/product/tiled/blocking.simd.h"
#include "kernels/product/tiled/transposed_steps.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Computes sums[kRows, kLanes] = a * b, or += if `accumulate`, for one vector of columns, whose first block is `block`.
// A cache line of the column in the same lane of `next` is prefetched in each step.
template <class T, class Element, int kRows>
MAXMOE_INLINE void multiply_skinny_in_registers(SkinnyRows<Element, kRows> a,
                                                TransposedBlock<BlockElement<T, Element>>& block,
                                                const ColumnVector<T>& columns, const ColumnVector<T>& following,
                                                const ColumnVector<T>& next, MatrixView<Accumulator<T>> sums,
                                                bool accumulate) {
  using S = Accumulator<T>;
  using Of = BlockElement<T, Element>;
  Accumulators<S, kRows, 1> sum(sums.data, sums.row_stride, accumulate);
  const T* const prefetched = next.column(0);
  const int64_t to_next_lane = next.column(1) - prefetched;
  const auto multiply = [&](int64_t step, bool has_second, Vector<Of> values) MAXMOE_INLINE_LAMBDA {
    const int64_t lane = step % kLanes<Of>;
    __builtin_prefetch(prefetched + lane * to_next_lane + (step - lane) * kDepthPerStep<Of>, /*write*/ 0,
                       /*locality: L2*/ 2);
    const int64_t first = step * kStepsPerBlockStep<T, Element>;
    for_steps_of_elements<Element>(first, has_second, values, [&](int64_t k, auto elements) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 12
      for (int r = 0; r < kRows; ++r) sum.of[r][0] = multiply_add(sum.of[r][0], a(r, k), elements);
    });
  };
  for_transposed_steps(block, columns, following, multiply);
  sum.store(sums.data, sums.row_stride);
}

// Whether a single group of rows is multiplied with steps in registers.
template <class T, class Element, int kRows>
constexpr bool kIsInRegisters =
    kVectorRegisters == 32 || (kRows <= 2 && std::is_same_v<Element, BlockElement<T, Element>>);

// The product of a single group of rows. Not inlined, once per number of rows: in one common function the compiler
// keeps fewer steps in registers.
template <class T, class Element, int kRows>
__attribute__((noinline)) void multiply_skinny_group(SkinnyRows<Element, kRows> a, ConstMatrixView<T> memory,
                                                     MatrixView<Accumulator<T>> sums, bool accumulate,
                                                     ConstMatrixView<T> next_memory) {
  constexpr int64_t kWidth = kNR<Accumulator<T>>;
  constexpr int64_t kHalfWidth = kLanes<Accumulator<T>>;
  if constexpr (kIsInRegisters<T, Element, kRows>) {
    auto block = first_block<BlockElement<T, Element>>(ColumnVector<T>{memory, 0});
    for (int64_t column = 0; column < memory.rows; column += kWidth) {
      const ConstMatrixView<T> columns = memory.row_range(column, memory.rows);
      const ConstMatrixView<T> after = memory.row_range(column + kWidth, memory.rows);
      // At the end of b the first block of `columns` is read once more.
      const ConstMatrixView<T>& following = after.rows > 0 ? after : columns;
      const ConstMatrixView<T> next = columns_to_prefetch(after, next_memory);
      for (int vector = 0; vector < 2; ++vector) {
        multiply_skinny_in_registers<T, Element, kRows>(
            a, block, {columns, vector}, {vector == 0 ? columns : following, 1 - vector}, {next, vector},
            sums.column_range(column + vector * kHalfWidth, column + (vector + 1) * kHalfWidth), accumulate);
      }
    }
  } else {
    // One panel has two chains of multiply-adds per row: for one or two rows too few to cover their latency.
    constexpr int64_t kWideColumns = 2 * kWidth;
    const int64_t wide = kRows <= 2 ? memory.rows / kWideColumns * kWideColumns : 0;
    const ConstMatrixView<T> rest = memory.row_range(wide, memory.rows);
    if constexpr (kRows <= 2) {
      multiply_group_in_parts<T, Element, kRows, 2>(a, memory.row_range(0, wide), rest.rows > 0 ? rest : next_memory,
                                                    sums, accumulate);
    }
    multiply_group_in_parts<T, Element, kRows, 1>(a, rest, next_memory, sums.column_range(wide, sums.columns),
                                                  accumulate);
  }
}

}  // namespace

// The product with a transposed b, whose columns are the rows of `memory`. At the end of b, the first columns of the
// next product are prefetched.
template <class T, class Element>
void multiply_skinny_transposed(const RowGroups<Element>& a, ConstMatrixView<T> memory, MatrixView<Accumulator<T>> sums,
                                bool accumulate, ConstMatrixView<T> next_memory) {
  if (a.count() == 1) {
    return with_number_of_rows(a.num_rows, [&]<int kRows> {
      multiply_skinny_group(SkinnyRows<Element, kRows>{a[0].steps}, memory, sums, accumulate, next_memory);
    });
  }
  multiply_groups_in_parts<T, Element>(a, memory, next_memory, sums, accumulate);
}

#define MAXMOE_INSTANTIATE_FOR(T)                                                              \
  template void multiply_skinny_transposed(const RowGroups<ElementOf<T>>&, ConstMatrixView<T>, \
                                           MatrixView<Accumulator<T>>, bool, ConstMatrixView<T>);

MAXMOE_FOR_EACH_TYPE(MAXMOE_INSTANTIATE_FOR)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
