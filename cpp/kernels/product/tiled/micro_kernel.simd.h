// The micro-kernel of the matrix product. It computes a micro-tile of C, MR rows and NR columns, in vector registers.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "kernels/isa/vector.simd.h"
#include "kernels/product/accumulators.simd.h"
#include "kernels/product/tiled/block_prefetch.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The size of a micro-tile: MR rows, and two vectors of columns. Its MR * 2 accumulators, the two vectors of B and a
// broadcast element of A take 27 of 32 registers, or 15 of 16.
//
// Two multiply-adds begin in each cycle and take 4 or 5 cycles, so that 10 independent accumulators keep both units
// busy. More accumulators lower the share of loads: a step has MR broadcasts and 2 vector loads for MR * 2
// multiply-adds.
constexpr int kMR = kVectorRegisters == 32 ? 12 : 6;
// 32 columns of float with AVX-512. S is the type of the accumulators.
template <class S>
constexpr int kNR = static_cast<int>(kLanesX2<S>);

// The arguments of a micro-kernel, except for B. If the next block of the inner dimension continues the sums, T is the
// accumulator's type, and c is in the order of VectorX2. Otherwise T is the type of the result.
template <class T, class Element>
struct MicroTile {
  const Element* a;  // a micro-panel: MR elements per step, steps contiguous
  int64_t num_steps;
  const Accumulator<T>* sums;  // initial values, kRows x NR, in the order of VectorX2; null for zeros
  T* c;
  int64_t c_stride;
  BlockPrefetch& next;  // the block of B that is prefetched
  int64_t num_lines;    // of `next` to prefetch, at most one per step
  bool is_nontemporal;  // whether c is written with non-temporal stores; it begins on a cache line then
};

// The prefetches of a micro-tile for loops without a known number of steps: at most one line per step. tile.next is
// copied to registers, because a store to packed B could alias it.
class TilePrefetch {
 public:
  template <class T, class Element>
  explicit MAXMOE_INLINE TilePrefetch(const MicroTile<T, Element>& tile)
      : lines_(tile.next), num_lines_(at_most(tile.num_lines, tile.next.num_lines())) {}

  MAXMOE_INLINE void advance() {
    if (num_lines_ <= 0) return;
    lines_.advance();
    --num_lines_;
  }
  // The lines that are left: they must be stored to tile.next.
  MAXMOE_INLINE const BlockPrefetch& rest() const { return lines_; }

 private:
  BlockPrefetch lines_;
  int64_t num_lines_;
};

// Whether a row of a micro-tile of T is whole cache lines, which non-temporal stores must write. A line in two parts
// would be written to memory twice.
template <class T>
constexpr bool kRowIsWholeLines = kNR<Accumulator<T>> * sizeof(T) % kCacheLineBytes == 0;

// Stores the sums of a micro-tile to c, rounded to its type.
template <int kRows, class T, class Element>
MAXMOE_INLINE void store_micro_tile(const MicroTile<T, Element>& tile, const Vector<Accumulator<T>> (&sum)[kRows][2]) {
  const auto store = [&]<bool kNonTemporal>() MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      store_narrowed_x2<T, kNonTemporal>(tile.c + r * tile.c_stride, {sum[r][0], sum[r][1]});
    }
  };
  if constexpr (kRowIsWholeLines<T>) {
    if (tile.is_nontemporal) return store.template operator()<true>();
  }
  store.template operator()<false>();
}

// The NR elements of one step of B, in the order of VectorX2. For pairs, each with the element below it in B.
template <class Element>
struct StepX2 {
  Vector<Element> first;
  Vector<Element> second;
};

// Step k of a micro-panel of B.
template <class Element>
MAXMOE_INLINE StepX2<Element> load_packed_step(const Element* panel, int64_t k) {
  const Element* of_step = panel + k * 2 * kLanes<Element>;
  return {load_vector(of_step), load_vector(of_step + kLanes<Element>)};
}

// Computes c[kRows, NR] = a * b, or `sums` + a * b. body(multiply_step) calls multiply_step(k, step_of_b) for each step
// of the inner dimension, which is one element of it, or a pair: the NR elements of a step of B are multiplied with one
// element of each row of A.
//
// An element of c is one chain of multiply-adds in the order of the steps, for every kRows. Its bits therefore do not
// depend on how C is divided into micro-tiles, tasks and threads.
template <int kRows, class T, class Element, class Body>
MAXMOE_INLINE void with_sums_of_micro_tile(const MicroTile<T, Element>& tile, const Body& body) {
  const Element* const a = tile.a;
  Accumulators<Accumulator<T>, kRows, 2> sum(tile.sums, kNR<Accumulator<T>>, tile.sums != nullptr);
  body([&](int64_t k, const StepX2<Element>& step) MAXMOE_INLINE_LAMBDA {
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Element factor = a[k * kMR + r];
      sum.of[r][0] = multiply_add(sum.of[r][0], factor, step.first);
      sum.of[r][1] = multiply_add(sum.of[r][1], factor, step.second);
    }
  });
  store_micro_tile<kRows>(tile, sum.of);
}

// The same, step by step. load_step_of_b(k) is called once per step.
template <int kRows, class T, class Element, class LoadStep>
MAXMOE_INLINE void multiply_micro_tile(const MicroTile<T, Element>& tile, const LoadStep& load_step_of_b) {
  with_sums_of_micro_tile<kRows>(tile, [&](const auto& multiply_step) MAXMOE_INLINE_LAMBDA {
    // The steps that prefetch have a separate loop, so that neither loop has a branch. BlockPrefetch is copied to
    // registers: a store to packed B could alias tile.next, which would then be loaded and stored in every step.
    const int64_t prefetching_steps = at_most(at_most(tile.num_lines, tile.next.num_lines()), tile.num_steps);
    BlockPrefetch lines = tile.next;
    for (int64_t k = 0; k < prefetching_steps; ++k) {
      lines.advance();
      multiply_step(k, load_step_of_b(k));
    }
    tile.next = lines;
    for (int64_t k = prefetching_steps; k < tile.num_steps; ++k) multiply_step(k, load_step_of_b(k));
  });
}

// The micro-tile of packed B: `b` is a micro-panel with NR elements per step.
template <int kRows, class T, class Element>
MAXMOE_INLINE void multiply_packed(const MicroTile<T, Element>& tile, const Element* b) {
  multiply_micro_tile<kRows>(tile, [b](int64_t k) { return load_packed_step(b, k); });
}

// The micro-kernel for packed B.
//
// It is called through a pointer, once per micro-tile. Its parameters are the members of MicroTile one by one, because
// most of them are then passed in registers; a struct would be written to memory by the caller and read back here.
template <class T, class Element, int kRows>
void micro_kernel(const Element* a, const Element* b, int64_t num_steps, const Accumulator<T>* sums, T* c,
                  int64_t c_stride, BlockPrefetch& next, int64_t num_lines, bool is_nontemporal) {
  multiply_packed<kRows>(MicroTile<T, Element>{a, num_steps, sums, c, c_stride, next, num_lines, is_nontemporal}, b);
}

template <class T, class Element>
using MicroKernel = void (*)(const Element*, const Element*, int64_t, const Accumulator<T>*, T*, int64_t,
                             BlockPrefetch&, int64_t, bool);

// The table of the micro-kernels, indexed by the number of rows less 1.
template <class T, class Element, size_t... kIndex>
MicroKernel<T, Element> micro_kernel_of_rows(int64_t rows, std::index_sequence<kIndex...> /*indices*/) {
  static constexpr MicroKernel<T, Element> kernels[] = {micro_kernel<T, Element, kIndex + 1>...};
  return kernels[rows - 1];
}

// The micro-kernel for 1 to MR rows. There is one kernel per number of rows, so that the last rows of a product cost no
// multiply-adds with padding.
template <class T, class Element>
MicroKernel<T, Element> micro_kernel_of_rows(int64_t rows) {
  return micro_kernel_of_rows<T, Element>(rows, std::make_index_sequence<kMR>());
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
