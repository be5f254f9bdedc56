// Non-owning views of matrices.
#pragma once

#include <cstdint>

#include "isa.h"

namespace maxmoe {

// The smaller of the two. Not std::min: where that is not inlined, the linker keeps one definition of it for all
// instruction sets (isa.h).
MAXMOE_INLINE int64_t at_most(int64_t value, int64_t limit) {
  return value < limit ? value : limit;
}

// [begin, end) of one dimension.
struct Range {
  int64_t begin;
  int64_t end;
  MAXMOE_INLINE int64_t size() const { return end - begin; }
};

// The `size` indices from `begin` on, or as many as there are below `limit`.
MAXMOE_INLINE Range range_from(int64_t begin, int64_t size, int64_t limit) {
  return {begin, at_most(begin + size, limit)};
}

// Element (r, c) is data[r * row_stride + c * column_stride]; strides are in elements.
template <class T>
struct MatrixView {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 1;

  MAXMOE_INLINE T* row(int64_t r) const { return data + r * row_stride; }
  MAXMOE_INLINE MatrixView row_range(int64_t begin, int64_t end) const {
    return {row(begin), end - begin, columns, row_stride, column_stride};
  }
  MAXMOE_INLINE MatrixView column_range(int64_t begin, int64_t end) const {
    return {data + begin * column_stride, rows, end - begin, row_stride, column_stride};
  }
  MAXMOE_INLINE MatrixView transposed() const { return {data, columns, rows, column_stride, row_stride}; }
  MAXMOE_INLINE MatrixView<const T> as_const() const { return {data, rows, columns, row_stride, column_stride}; }
};

template <class T>
using ConstMatrixView = MatrixView<const T>;

// Matrices of one shape at a constant stride, one per group.
template <class T>
struct MatrixStack {
  MatrixView<T> first;
  int64_t count = 0;
  int64_t stride = 0;

  MAXMOE_INLINE MatrixView<T> operator[](int64_t index) const {
    MatrixView<T> view = first;
    view.data += index * stride;
    return view;
  }
  MAXMOE_INLINE bool empty() const { return first.data == nullptr; }
};

template <class T>
using ConstMatrixStack = MatrixStack<const T>;

}  // namespace maxmoe
