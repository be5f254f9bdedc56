// Packing of A and B: copies of their blocks in the order in which a micro-kernel reads them, converted to the type in
// which it multiplies. Only for the .cpp files that are compiled per instruction set.
#pragma once

#include "executor.h"
#include "micro_kernel.h"
#include "row.h"
#include "transpose.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Columns of B that are packed at a time: 4 micro-panels. Rows of large matrices are pages apart, so that each row is
// a TLB miss: it then brings 4 to 8 cache lines (float32, AVX2 to AVX-512) instead of 1 or 2. 8 micro-panels are
// slower, as they leave too little of the second-level cache to the block of A.
template <class S>
constexpr int64_t kNC = 4 * int64_t{kNR<S>};

// Micro-panels of a transposed A that are packed at a time, for the same reason.
constexpr int64_t kPackAPanels = 8;

// How many steps ahead of its copy a row is prefetched.
constexpr int64_t kPackPrefetchSteps = 8;

// Element is what one step of a micro-kernel multiplies: an Accumulator<T>, or a BFloat16Pair for two of the inner
// dimension.
template <class Element>
constexpr int64_t kDepthPerStep = std::is_same_v<Element, BFloat16Pair> ? 2 : 1;
template <class Element>
constexpr int64_t steps_of_depth(int64_t depth) {
  return (depth + kDepthPerStep<Element> - 1) / kDepthPerStep<Element>;
}

MAXMOE_INLINE BFloat16Pair make_pair(BFloat16 first, BFloat16 second) {
  return first.bits | static_cast<BFloat16Pair>(second.bits) << 16;
}

// Packs `depth` elements that are neighbours along the inner dimension and in memory: pairs are then a plain copy, with
// a zero beside the last element of an odd depth.
template <class Element, class T>
MAXMOE_INLINE void pack_along_depth(const T* source, Element* target, int64_t depth) {
  if constexpr (std::is_same_v<Element, BFloat16Pair>) {
    if (depth % 2 != 0) target[depth / 2] = make_pair(source[depth - 1], BFloat16{0});
    if (depth > 1) std::memcpy(target, source, static_cast<size_t>(depth / 2) * sizeof(BFloat16Pair));
  } else {
    widen_row(source, target, depth);
  }
}

// Packs one step of a micro-panel: `width` elements of a row, across the inner dimension. For pairs, each with the
// element below it in the next row, or with a zero where there is none.
template <class Element, class T>
MAXMOE_INLINE void pack_step(const T* row, int64_t row_stride, bool is_last_row, int64_t width, Element* target) {
  if constexpr (std::is_same_v<Element, BFloat16Pair>) {
    const T* next = row + row_stride;
    for (int64_t c = 0; c < width; ++c) target[c] = make_pair(row[c], is_last_row ? BFloat16{0} : next[c]);
  } else if (width == kNR<Element>) {
#pragma GCC unroll 2
    for (int v = 0; v < kNRVectors; ++v) {
      store_vector(target + v * kLanes<Element>, load_vector(row + v * kLanes<Element>));
    }
  } else if (width == kMR) {
#pragma GCC unroll 12
    for (int r = 0; r < kMR; ++r) target[r] = widen(row[r]);
  } else {
    widen_row(row, target, width);
  }
}

// A block of A as a micro-kernel reads it.
template <class Element>
struct ABlock {
  const Element* data;
  int64_t row_stride;  // in elements; 0 in micro-panels
  ALayout layout;
};

// A block of A, packed into scratch memory or in place. Rows need no micro-panels, as a micro-kernel broadcasts
// single elements of A: they are taken as they are, or converted. Of a transposed A the elements of a step are
// neighbours: it is packed into micro-panels.
template <class Element, class T>
ABlock<Element> pack_a(ConstMatrixView<T> a) {
  const int64_t num_steps = steps_of_depth<Element>(a.columns);
  if (a.column_stride == 1) {
    if constexpr (std::is_same_v<T, Element>) return {a.data, a.row_stride, ALayout::rows};
    Element* rows = scratch<Element>(kPackedAScratch, a.rows * num_steps);
    for (int64_t r = 0; r < a.rows; ++r) pack_along_depth(a.row(r), rows + r * num_steps, a.columns);
    return {rows, num_steps, ALayout::rows};
  }
  const int64_t num_panels = (a.rows + kMR - 1) / kMR;
  Element* const panels = scratch<Element>(kPackedAScratch, num_panels * kMR * num_steps);
  for (int64_t first = 0; first < num_panels; first += kPackAPanels) {
    const int64_t last = at_most(first + kPackAPanels, num_panels);
    for (int64_t k = 0; k < num_steps; ++k) {
      const T* column = a.data + kDepthPerStep<Element> * k * a.column_stride;
      const bool is_last_column = kDepthPerStep<Element> * k + 1 == a.columns;
      // This may be past the last column: a prefetch never faults.
      prefetch_row(column + first * kMR + kDepthPerStep<Element> * kPackPrefetchSteps * a.column_stride,
                   (last - first) * kMR);
      for (int64_t p = first; p < last; ++p) {
        pack_step<Element>(column + p * kMR, a.column_stride, is_last_column, at_most(a.rows - p * kMR, kMR),
                           panels + (p * num_steps + k) * kMR);
      }
    }
  }
  return {panels, 0, ALayout::micro_panels};
}

// Packs at most NC columns of B into micro-panels of NR columns, one after the other. The last one is filled with
// columns of zeros, so that a micro-kernel always has NR.
template <class Element, class T>
const Element* pack_b(ConstMatrixView<T> b) {
  constexpr int64_t kWidth = kNR<Accumulator<T>>;
  const int64_t num_steps = steps_of_depth<Element>(b.rows);
  const int64_t num_panels = (b.columns + kWidth - 1) / kWidth;
  Element* const panels = scratch<Element>(kPackedBScratch, num_panels * num_steps * kWidth);
  const int64_t last_width = b.columns - (num_panels - 1) * kWidth;
  if (last_width < kWidth) zero_row(panels + (num_panels - 1) * num_steps * kWidth, num_steps * kWidth);
  if (b.column_stride == 1 || b.columns == 1) {
    for (int64_t k = 0; k < num_steps; ++k) {
      const T* row = b.row(kDepthPerStep<Element> * k);
      const bool is_last_row = kDepthPerStep<Element> * k + 1 == b.rows;
      prefetch_row(b.row(kDepthPerStep<Element> * (k + kPackPrefetchSteps)), b.columns);
      for (int64_t p = 0; p < num_panels; ++p) {
        pack_step<Element>(row + p * kWidth, b.row_stride, is_last_row, p + 1 < num_panels ? kWidth : last_width,
                           panels + (p * num_steps + k) * kWidth);
      }
    }
    return panels;
  }
  // The columns of a transposed B are rows in memory: read in that order, and transposed into the micro-panel.
  for (int64_t p = 0; p < num_panels; ++p) {
    const auto copy = [&](int64_t column, int64_t first_step, int64_t count, Element* target) {
      const int64_t first_row = first_step * kDepthPerStep<Element>;
      const T* source = b.data + (p * kWidth + column) * b.column_stride + first_row;
      pack_along_depth(source, target, at_most(b.rows - first_row, count * kDepthPerStep<Element>));
    };
    transpose_rows<Element>(p + 1 < num_panels ? kWidth : last_width, num_steps, copy, panels + p * num_steps * kWidth,
                            kWidth);
  }
  return panels;
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
