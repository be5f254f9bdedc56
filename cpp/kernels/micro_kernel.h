// The micro-kernel of the matrix product: a micro-tile of C, MR rows and NR columns, in vector registers. Only for the
// .cpp files that are compiled per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "block_prefetch.h"
#include "vector.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The size of a micro-tile: its accumulators (MR * 2 vectors), the two vectors of B and a broadcast element of A take
// 27 of 32 registers, or 15 of 16. Two multiply-adds begin in each cycle and take 4 or 5, so that 10 independent
// accumulators keep both units busy; more of them lower the share of loads, MR broadcasts and 2 vectors for MR * 2
// multiply-adds.
constexpr int kMR = kVectorRegisters == 32 ? 12 : 6;
template <class S>
constexpr int kNR = static_cast<int>(kLanesX2<S>);

// What a micro-kernel multiplies beside B. T is the accumulator's type for sums that another call goes on with, which
// keep the order of VectorX2; or the type of the result.
template <class T, class Element>
struct MicroTile {
  const Element* a;  // a micro-panel: the MR elements of one step follow those of the step before
  int64_t num_steps;
  const Accumulator<T>* sums;  // kRows x NR, contiguous, in the order of VectorX2; null for zeros
  T* c;
  int64_t c_stride;
  BlockPrefetch& next;
  int64_t num_lines;  // of `next`, at most one per step
};

// The NR elements of one step of B, their columns in the order of VectorX2. For pairs each with the one below it.
template <class Element>
struct StepX2 {
  Vector<Element> first;
  Vector<Element> second;
};

// c[kRows, NR] = a * b, or `sums` + a * b, over `num_steps` of the inner dimension: of one element each, or of a pair.
// At a step the NR elements of a row of B are loaded once, and multiplied with one element of each row of A. An element
// of c is one chain of multiply-adds in the order of the steps, whatever kRows is: this makes the product bitwise
// reproducible.
template <int kRows, class T, class Element, class LoadStep>
MAXMOE_INLINE void multiply_micro_tile(const MicroTile<T, Element>& tile, const LoadStep& load_step_of_b) {
  using S = Accumulator<T>;
  const Element* const a = tile.a;
  Vector<S> sum[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      sum[r][v] = tile.sums != nullptr ? load_vector(tile.sums + r * kNR<S> + v * kLanes<S>) : Vector<S>{};
    }
  }
  const auto multiply_step = [&](int64_t k) {
    const StepX2<Element> step = load_step_of_b(k);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Element factor = a[k * kMR + r];
      sum[r][0] = multiply_add(sum[r][0], factor, step.first);
      sum[r][1] = multiply_add(sum[r][1], factor, step.second);
    }
  };
  const int64_t prefetching_steps = at_most(at_most(tile.num_lines, tile.next.num_lines()), tile.num_steps);
  BlockPrefetch lines = tile.next;
  for (int64_t k = 0; k < prefetching_steps; ++k) {
    lines.advance();
    multiply_step(k);
  }
  tile.next = lines;
  for (int64_t k = prefetching_steps; k < tile.num_steps; ++k) multiply_step(k);
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) store_narrowed_x2<T>(tile.c + r * tile.c_stride, {sum[r][0], sum[r][1]});
}

// For packed B: a micro-panel, in which the NR elements of one step follow those of the step before.
template <class T, class Element, int kRows>
void micro_kernel(const Element* a, const Element* b, int64_t num_steps, const Accumulator<T>* sums, T* c,
                  int64_t c_stride, BlockPrefetch& next, int64_t num_lines) {
  const MicroTile<T, Element> tile{a, num_steps, sums, c, c_stride, next, num_lines};
  multiply_micro_tile<kRows>(tile, [b](int64_t k) -> StepX2<Element> {
    const Element* of_step = b + k * kNR<Accumulator<T>>;
    return {load_vector(of_step), load_vector(of_step + kLanes<Element>)};
  });
}

template <class T, class Element>
using MicroKernel = void (*)(const Element*, const Element*, int64_t, const Accumulator<T>*, T*, int64_t,
                             BlockPrefetch&, int64_t);

template <class T, class Element, size_t... kIndex>
MicroKernel<T, Element> micro_kernel_of_rows(int64_t rows, std::index_sequence<kIndex...> /*indices*/) {
  static constexpr MicroKernel<T, Element> kernels[] = {micro_kernel<T, Element, kIndex + 1>...};
  return kernels[rows - 1];
}

// The micro-kernel for 1 to MR rows: the last rows of a product run one of their own height, so that no multiply-adds
// are wasted on padding.
template <class T, class Element>
MicroKernel<T, Element> micro_kernel_of_rows(int64_t rows) {
  return micro_kernel_of_rows<T, Element>(rows, std::make_index_sequence<kMR>());
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
