// A small matrix product in registers. Only for the .cpp files that are compiled per instruction set.
#pragma once

#include <cstdint>
#include <utility>

#include "vector.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

constexpr int kVectors = 2;  // across a micro-tile
constexpr int kHeight = kVectorRegisters == 32 ? 12 : 6;
template <class S>
constexpr int kWidth = kVectors * kLanes<S>;

// Where the elements of a lie: in rows of stride `stride`, or in panels of kHeight rows, one step after the other.
enum class Layout { rows, panels };

// c[kRows, kWidth] = or += a * b, over `depth` steps; b is a panel
template <class S, class Element, Layout kLayout, int kRows>
void micro_tile(const Element* a, int64_t a_stride, const Element* b, int64_t depth, S* c, int64_t c_stride,
                bool accumulate) {
  Vector<S> sum[kRows][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = accumulate ? load_vector(c + r * c_stride + v * kLanes<S>) : Vector<S>{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector<Element> row_of_b[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) row_of_b[v] = load_vector(b + k * kWidth<S> + v * kLanes<S>);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const Element factor = kLayout == Layout::rows ? a[r * a_stride + k] : a[k * kHeight + r];
#pragma GCC unroll 2
      for (int v = 0; v < kVectors; ++v) sum[r][v] = multiply_add(sum[r][v], factor, row_of_b[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      store_vector<S>(c + r * c_stride + v * kLanes<S>, sum[r][v]);
    }
  }
}

template <class S, class Element>
using MicroTile = void (*)(const Element*, int64_t, const Element*, int64_t, S*, int64_t, bool);

template <class S, class Element, Layout kLayout, size_t... kIndex>
MicroTile<S, Element> micro_tile_of(int64_t rows, std::index_sequence<kIndex...> /*heights*/) {
  static constexpr MicroTile<S, Element> tiles[] = {micro_tile<S, Element, kLayout, kIndex + 1>...};
  return tiles[rows - 1];
}

// The micro-tile of 1 to kHeight rows.
template <class S, class Element, Layout kLayout>
MicroTile<S, Element> micro_tile_of(int64_t rows) {
  return micro_tile_of<S, Element, kLayout>(rows, std::make_index_sequence<kHeight>());
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
