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

// c[kRows, kColumnVectors * kLanes] = or += a * b, over `depth` steps
template <class S, class A, class B, Layout kLayout, int kRows, int kColumnVectors>
void micro_tile(const A* a, int64_t a_stride, const B* b, int64_t b_stride, int64_t depth, S* c, int64_t c_stride,
                bool accumulate) {
  Vector<S> sum[kRows][kColumnVectors];
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kColumnVectors; ++v) {
      sum[r][v] = accumulate ? load_vector(c + r * c_stride + v * kLanes<S>) : Vector<S>{};
    }
  }
  for (int64_t k = 0; k < depth; ++k) {
    Vector<VectorElement<B>> row_of_b[kColumnVectors];
#pragma GCC unroll 8
    for (int v = 0; v < kColumnVectors; ++v) row_of_b[v] = load_vector(b + k * b_stride + v * kLanes<S>);
#pragma GCC unroll 12
    for (int r = 0; r < kRows; ++r) {
      const A factor = kLayout == Layout::rows ? a[r * a_stride + k] : a[k * kHeight + r];
#pragma GCC unroll 8
      for (int v = 0; v < kColumnVectors; ++v) sum[r][v] = multiply_add(sum[r][v], factor, row_of_b[v]);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int v = 0; v < kColumnVectors; ++v) {
      store_vector<S>(c + r * c_stride + v * kLanes<S>, sum[r][v]);
    }
  }
}

// Vectors across a micro-tile of few rows: as many as there are registers for, so that b is read in long pieces.
constexpr int wide_vectors(int rows) {
  int vectors = 8;
  while (vectors > kVectors && rows * vectors > kVectors * kHeight) vectors /= 2;
  return vectors;
}

template <class S, class A, class B>
using MicroTile = void (*)(const A*, int64_t, const B*, int64_t, int64_t, S*, int64_t, bool);

template <class S, class A, class B, Layout kLayout, bool kIsWide, size_t... kIndex>
MicroTile<S, A, B> micro_tile_of(int64_t rows, std::index_sequence<kIndex...> /*heights*/) {
  static constexpr MicroTile<S, A, B> tiles[] = {
      micro_tile < S, A, B, kLayout, kIndex + 1, kIsWide ? wide_vectors(kIndex + 1) : kVectors > ...};
  return tiles[rows - 1];
}

// The micro-tile of 1 to kHeight rows.
template <class S, class A, class B, Layout kLayout, bool kIsWide>
MicroTile<S, A, B> micro_tile_of(int64_t rows) {
  return micro_tile_of<S, A, B, kLayout, kIsWide>(rows, std::make_index_sequence<kHeight>());
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
