// The micro-kernel that packs a transposed B.
#pragma once

#include "kernels/product/tiled/transposed_steps.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// micro_kernel_packing_b for a transposed B. Its two vectors of columns are multiplied one after the other, because
// registers hold the blocks of one; the sums of the first one wait in memory, and the sums of the second one are not
// loaded before. Hence not Accumulators.
template <class Out, class Element, class T>
void micro_kernel_packing_transposed_b(const MicroTile<Out, Element>& tile, const GemmOperand<T>& b, Range depth,
                                       int64_t column, Element* panel) {
  using S = Accumulator<Out>;
  using Of = BlockElement<T, Element>;
  constexpr int kWidth = kNR<S>;
  count_packed(depth.size() * kWidth);
  const ConstMatrixView<T> memory = b.memory.row_range(column, column + kWidth).column_range(depth.begin, depth.end);
  auto block = first_block<Of>(ColumnVector<T>{memory, 0});
  TilePrefetch prefetch(tile);
  Vector<S> sum[kMR][2];
#pragma GCC unroll 2
  for (int vector = 0; vector < 2; ++vector) {
#pragma GCC unroll 12
    for (int r = 0; r < kMR; ++r) {
      sum[r][vector] = tile.sums != nullptr ? load_vector(tile.sums + r * kWidth + vector * kLanes<S>) : Vector<S>{};
    }
    Element* const packed = panel + vector * kLanes<S>;
    const auto multiply = [&](int64_t step, bool has_second, Vector<Of> values) MAXMOE_INLINE_LAMBDA {
      prefetch.advance();
      const int64_t first = step * kStepsPerBlockStep<T, Element>;
      for_steps_of_elements<Element>(first, has_second, values, [&](int64_t k, auto elements) MAXMOE_INLINE_LAMBDA {
        store_vector<Element>(packed + k * kWidth, elements);
#pragma GCC unroll 12
        for (int r = 0; r < kMR; ++r) {
          sum[r][vector] = multiply_add(sum[r][vector], tile.a[k * kMR + r], elements);
        }
      });
    };
    for_transposed_steps<Of, T>(block, {memory, vector}, {memory, 1 - vector}, multiply);
  }
  tile.next = prefetch.rest();
  store_micro_tile<kMR>(tile, sum);
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
