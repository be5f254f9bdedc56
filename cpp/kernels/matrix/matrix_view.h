// Non-owning views of matrices, row-major or transposed.
#pragma once

#include <cstdint>

#include "kernels/isa/isa.h"

namespace maxmoe {

// Minimum of two integers. Not std::min, which is an inline function: if it is not inlined, the linker keeps one
// definition for all instruction sets (isa.h).
MAXMOE_INLINE int64_t at_most(int64_t value, int64_t limit) {
  return value < limit ? value : limit;
}

// The indices [begin, end) of one dimension.
struct Range {
  int64_t begin;
  int64_t end;
  MAXMOE_INLINE int64_t size() const { return end - begin; }
};

// The range of `size` indices from `begin` on, cut off at `limit`.
MAXMOE_INLINE Range range_from(int64_t begin, int64_t size, int64_t limit) {
  return {begin, at_most(begin + size, limit)};
}

// A view of a matrix: element (r, c) is data[r * row_stride + c * column_stride]. Strides are in elements, not in
// bytes.
template <class T>
struct MatrixView {
  T* data = nullptr;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 1;

  // Pointer to element (r, 0). The next four functions return views of the same memory.
  MAXMOE_DEVICE MAXMOE_INLINE T* row(int64_t r) const { return data + r * row_stride; }
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

// Matrices of one shape at a constant stride, one per group: the weights of the experts.
template <class T>
struct MatrixStack {
  MatrixView<T> first;
  int64_t count = 0;
  int64_t stride = 0;

  MAXMOE_DEVICE MAXMOE_INLINE MatrixView<T> operator[](int64_t index) const {
    MatrixView<T> view = first;
    view.data += index * stride;
    return view;
  }
  MAXMOE_INLINE bool empty() const { return first.data == nullptr; }
};

template <class T>
using ConstMatrixStack = MatrixStack<const T>;

}  // namespace maxmoe
