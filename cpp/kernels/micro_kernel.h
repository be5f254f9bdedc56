// The micro-kernel of the matrix product: a micro-tile of C, MR rows and NR columns, in vector registers. Only for the
// .cpp files that are compiled per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "vector.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The size of a micro-tile: its accumulators (MR * 2 vectors), the two vectors of B and a broadcast element of A take
// 27 of 32 registers, or 15 of 16. Two multiply-adds begin in each cycle and take 4 or 5, so that 10 independent
// accumulators keep both units busy; more of them lower the share of loads, MR broadcasts and 2 vectors for MR * 2
// multiply-adds.
constexpr int kMR = kVectorRegisters == 32 ? 12 : 6;
template <class S>
constexpr int kNR = static_cast<int>(kLanesX2<S>);

// c[kRows, NR] = a * b, or `sums` + a * b, over `num_steps` of the inner dimension: of one element each, or of a pair.
// At a step the NR elements of a row of B are loaded once, and multiplied with one element of each row of A: a and b
// are micro-panels, in which the MR, or NR, elements of one step follow those of the step before. An element of c is
// one chain of multiply-adds in the order of the steps, whatever kRows is: this makes the product bitwise reproducible.
//
// b and `sums` (kRows x NR, contiguous, null for zeros) have their columns in the order of VectorX2. T is the
// accumulator's type for sums that another call goes on with, which keep that order; or the type of the result.
template <class T, class Element, int kRows>
void micro_kernel(const Element* a, const Element* b, int64_t num_steps, const Accumulator<T>* sums, T* c,
                  int64_t c_stride) {
  using S = Accumulator<T>;
  Vector<S> sum[kRows][2];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) {
      sum[r][v] = sums != nullptr ? load_vector(sums + r * kNR<S> + v * kLanes<S>) : Vector<S>{};
    }
  }
  for (int64_t k = 0; k < num_steps; ++k) {
    Vector<Element> row_of_b[2];
#pragma GCC unroll 2
    for (int v = 0; v < 2; ++v) row_of_b[v] = load_vector(b + k * kNR<S> + v * kLanes<S>);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Element factor = a[k * kMR + r];
#pragma GCC unroll 2
      for (int v = 0; v < 2; ++v) sum[r][v] = multiply_add(sum[r][v], factor, row_of_b[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) store_narrowed_x2<T>(c + r * c_stride, {sum[r][0], sum[r][1]});
}

template <class T, class Element>
using MicroKernel = void (*)(const Element*, const Element*, int64_t, const Accumulator<T>*, T*, int64_t);

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
