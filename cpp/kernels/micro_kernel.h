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
constexpr int kNRVectors = 2;
constexpr int kMR = kVectorRegisters == 32 ? 12 : 6;
template <class S>
constexpr int kNR = kNRVectors * kLanes<S>;

// The layouts of A that a micro-kernel reads: rows, some stride apart; or micro-panels of MR rows, in which the MR
// elements of one step follow those of the step before.
enum class ALayout { rows, micro_panels };

// What a micro-kernel prefetches at each of its steps, for the micro-tiles after its own.
struct NoPrefetch {
  MAXMOE_INLINE void operator()(int64_t /*step*/) const {}
};

// One cache line at each step, into the second-level cache: the first line of each row, then the second one of each,
// and so on. The number of rows is rounded up to a power of two, as a division would cost more than the prefetch.
class PrefetchRows {
 public:
  template <class T>
  MAXMOE_INLINE PrefetchRows(const T* first, int64_t row_stride, int64_t num_rows)
      : first_(reinterpret_cast<const std::byte*>(first)),
        stride_bytes_(row_stride * int64_t{sizeof(T)}),
        log2_num_rows_(num_rows < 2 ? 0 : 64 - __builtin_clzll(static_cast<uint64_t>(num_rows) - 1)) {}

  MAXMOE_INLINE void operator()(int64_t step) const {
    const int64_t row = step & ((int64_t{1} << log2_num_rows_) - 1);
    const int64_t line = step >> log2_num_rows_;
    __builtin_prefetch(first_ + row * stride_bytes_ + line * kCacheLineBytes, /*write*/ 0, /*locality: L2*/ 2);
  }

 private:
  const std::byte* first_;
  int64_t stride_bytes_;
  int log2_num_rows_;
};

// c[kRows, NR] = or += a * b, over `num_steps` of the inner dimension: of one element each, or of a pair. At a step the
// NR elements of a row of B are loaded once, and multiplied with one element of each row of A. An element of c is one
// chain of multiply-adds in the order of the steps, whatever kRows is: this makes the product bitwise reproducible.
template <class S, class Element, class Prefetch, ALayout kALayout, int kRows>
void micro_kernel(const Element* a, int64_t a_stride, const Element* b, int64_t b_stride, int64_t num_steps, S* c,
                  int64_t c_stride, bool accumulate, const Prefetch& prefetch) {
  Vector<S> sum[kRows][kNRVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kNRVectors; ++v) {
      sum[r][v] = accumulate ? load_vector(c + r * c_stride + v * kLanes<S>) : Vector<S>{};
    }
  }
  for (int64_t k = 0; k < num_steps; ++k) {
    prefetch(k);
    Vector<Element> row_of_b[kNRVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kNRVectors; ++v) row_of_b[v] = load_vector(b + k * b_stride + v * kLanes<S>);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Element factor = kALayout == ALayout::rows ? a[r * a_stride + k] : a[k * kMR + r];
#pragma GCC unroll 2
      for (int v = 0; v < kNRVectors; ++v) sum[r][v] = multiply_add(sum[r][v], factor, row_of_b[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kNRVectors; ++v) {
      store_vector<S>(c + r * c_stride + v * kLanes<S>, sum[r][v]);
    }
  }
}

template <class S, class Element, class Prefetch>
using MicroKernel = void (*)(const Element*, int64_t, const Element*, int64_t, int64_t, S*, int64_t, bool,
                             const Prefetch&);

template <class S, class Element, class Prefetch, ALayout kALayout, size_t... kIndex>
MicroKernel<S, Element, Prefetch> micro_kernel_of_rows(int64_t rows, std::index_sequence<kIndex...> /*indices*/) {
  static constexpr MicroKernel<S, Element, Prefetch> kernels[] = {
      micro_kernel<S, Element, Prefetch, kALayout, kIndex + 1>...};
  return kernels[rows - 1];
}

// The micro-kernel for 1 to MR rows: the last rows of a block run one of their own height, so that
// no multiply-adds are wasted on padding.
template <class S, class Element, class Prefetch, ALayout kALayout>
MicroKernel<S, Element, Prefetch> micro_kernel_of_rows(int64_t rows) {
  return micro_kernel_of_rows<S, Element, Prefetch, kALayout>(rows, std::make_index_sequence<kMR>());
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
