// A small matrix product in registers. Only for the .cpp files that are compiled per instruction set.
#pragma once

#include <cstddef>
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

// What a micro-tile asks of memory for those after it, at each of its steps.
struct AskNothing {
  MAXMOE_INLINE void operator()(int64_t /*step*/) const {}
};

// A line of each of 2^log_rows rows, then the next line of each.
struct AskRows {
  const std::byte* first;
  int64_t stride;  // in bytes
  int log_rows;

  MAXMOE_INLINE void operator()(int64_t step) const {
    const int64_t row = step & ((int64_t{1} << log_rows) - 1);
    __builtin_prefetch(first + row * stride + (step >> log_rows) * kCacheLine, 0, 2);  // into the second-level cache
  }
};

// c[kRows, kWidth] = or += a * b, over `depth` steps
template <class S, class Element, class Ask, Layout kLayout, int kRows>
void micro_tile(const Element* a, int64_t a_stride, const Element* b, int64_t b_stride, int64_t depth, S* c,
                int64_t c_stride, bool accumulate, const Ask& ask) {
  Vector<S> sum[kRows][kVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) {
      sum[r][v] = accumulate ? load_vector(c + r * c_stride + v * kLanes<S>) : Vector<S>{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    ask(k);
    Vector<Element> row_of_b[kVectors];
#pragma GCC unroll 2
    for (int v = 0; v < kVectors; ++v) row_of_b[v] = load_vector(b + k * b_stride + v * kLanes<S>);
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

template <class S, class Element, class Ask>
using MicroTile = void (*)(const Element*, int64_t, const Element*, int64_t, int64_t, S*, int64_t, bool, const Ask&);

template <class S, class Element, class Ask, Layout kLayout, size_t... kIndex>
MicroTile<S, Element, Ask> micro_tile_of(int64_t rows, std::index_sequence<kIndex...> /*heights*/) {
  static constexpr MicroTile<S, Element, Ask> tiles[] = {micro_tile<S, Element, Ask, kLayout, kIndex + 1>...};
  return tiles[rows - 1];
}

// The micro-tile of 1 to kHeight rows.
template <class S, class Element, class Ask, Layout kLayout>
MicroTile<S, Element, Ask> micro_tile_of(int64_t rows) {
  return micro_tile_of<S, Element, Ask, kLayout>(rows, std::make_index_sequence<kHeight>());
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
