// Copies blocks of matrices to the layouts that a micro-tile reads. Only for the .cpp files that are compiled per
// instruction set.
#pragma once

#include "executor.h"
#include "micro_tile.h"
#include "row.h"
#include "transpose.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Panels of b and of a transposed a that are copied at a time, so that a row gives several cache lines for one look-up
// of its page; and how far ahead rows are asked for.
constexpr int64_t kPanels = 4;
constexpr int64_t kLeftPanels = 8;
constexpr int64_t kRowsAhead = 8;

// Element is what one step multiplies: Accumulator<T> or Pair.
template <class Element>
constexpr int64_t kStep = std::is_same_v<Element, Pair> ? 2 : 1;
template <class Element>
constexpr int64_t steps(int64_t depth) {
  return (depth + kStep<Element> - 1) / kStep<Element>;
}

MAXMOE_INLINE Pair make_pair(BFloat16 first, BFloat16 second) {
  return first.bits | static_cast<Pair>(second.bits) << 16;
}

// A row whose elements follow each other.
template <class Element, class T>
MAXMOE_INLINE void copy_elements(const T* source, Element* target, int64_t depth) {
  if constexpr (std::is_same_v<Element, Pair>) {
    if (depth % 2 != 0) target[depth / 2] = make_pair(source[depth - 1], BFloat16{0});
    if (depth > 1) std::memcpy(target, source, static_cast<size_t>(depth / 2) * sizeof(Pair));
  } else {
    widen_row(source, target, depth);
  }
}

// One step of a panel: `columns` elements of a row of b or of a column of a, or pairs with those of the next one.
template <class Element, class T>
MAXMOE_INLINE void panel_row(const T* row, int64_t row_stride, bool is_last_alone, int64_t columns, Element* target) {
  if constexpr (std::is_same_v<Element, Pair>) {
    const T* next = row + row_stride;
    for (int64_t c = 0; c < columns; ++c) target[c] = make_pair(row[c], is_last_alone ? BFloat16{0} : next[c]);
  } else if (columns == kWidth<Element>) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      store_vector(target + v * kLanes<Element>, load_vector(row + v * kLanes<Element>));
    }
  } else if (columns == kHeight) {
#pragma GCC unroll 12
    for (int r = 0; r < kHeight; ++r) target[r] = widen(row[r]);
  } else {
    widen_row(row, target, columns);
  }
}

// A block of a in the layout that the micro-tile reads.
template <class Element>
struct LeftBlock {
  const Element* data;
  int64_t stride;  // of rows
  Layout layout;
};

template <class Element, class T>
LeftBlock<Element> left_block(ConstMatrixView<T> a) {
  const int64_t depth = steps<Element>(a.columns);
  if (a.column_stride == 1) {
    if constexpr (std::is_same_v<T, Element>) return {a.data, a.row_stride, Layout::rows};
    Element* rows = scratch<Element>(kGemmScratch, a.rows * depth);
    for (int64_t r = 0; r < a.rows; ++r) copy_elements(a.row(r), rows + r * depth, a.columns);
    return {rows, depth, Layout::rows};
  }
  const int64_t num_panels = (a.rows + kHeight - 1) / kHeight;
  Element* const block = scratch<Element>(kGemmScratch, num_panels * kHeight * depth);
  for (int64_t first = 0; first < num_panels; first += kLeftPanels) {
    const int64_t last = at_most(first + kLeftPanels, num_panels);
    for (int64_t k = 0; k < depth; ++k) {
      const T* column = a.data + kStep<Element> * k * a.column_stride;
      const bool is_last_alone = kStep<Element> * k + 1 == a.columns;
      prefetch_row(column + first * kHeight + kStep<Element> * kRowsAhead * a.column_stride, (last - first) * kHeight);
      for (int64_t p = first; p < last; ++p) {
        panel_row<Element>(column + p * kHeight, a.column_stride, is_last_alone, at_most(a.rows - p * kHeight, kHeight),
                           block + (p * depth + k) * kHeight);
      }
    }
  }
  return {block, 0, Layout::panels};
}

// At most kPanels panels of b, one after the other; the columns past those of b are zero.
template <class Element, class T>
const Element* right_panels(ConstMatrixView<T> b) {
  constexpr int64_t kPanelWidth = kWidth<Accumulator<T>>;
  const int64_t depth = steps<Element>(b.rows);
  const int64_t num_panels = (b.columns + kPanelWidth - 1) / kPanelWidth;
  Element* const panels = scratch<Element>(kGemmScratch + 1, num_panels * depth * kPanelWidth);
  const int64_t last_width = b.columns - (num_panels - 1) * kPanelWidth;
  if (last_width < kPanelWidth) zero_row(panels + (num_panels - 1) * depth * kPanelWidth, depth * kPanelWidth);
  if (b.column_stride == 1 || b.columns == 1) {
    for (int64_t k = 0; k < depth; ++k) {
      const T* row = b.row(kStep<Element> * k);
      const bool is_last_alone = kStep<Element> * k + 1 == b.rows;
      prefetch_row(b.row(kStep<Element> * (k + kRowsAhead)), b.columns);
      for (int64_t p = 0; p < num_panels; ++p) {
        panel_row<Element>(row + p * kPanelWidth, b.row_stride, is_last_alone,
                           p + 1 < num_panels ? kPanelWidth : last_width, panels + (p * depth + k) * kPanelWidth);
      }
    }
    return panels;
  }
  for (int64_t p = 0; p < num_panels; ++p) {
    const auto copy = [&](int64_t row, int64_t begin, int64_t count, Element* target) {
      const int64_t first = begin * kStep<Element>;
      const T* source = b.data + (p * kPanelWidth + row) * b.column_stride + first;
      copy_elements(source, target, at_most(b.rows - first, count * kStep<Element>));
    };
    transpose_rows<Element>(p + 1 < num_panels ? kPanelWidth : last_width, depth, copy,
                            panels + p * depth * kPanelWidth, kPanelWidth);
  }
  return panels;
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
