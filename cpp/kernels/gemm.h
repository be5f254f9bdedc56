// The matrix product that the kernels are built on.
#pragma once

#include "matrix_view.h"

namespace maxmoe {

// A matrix as a product reads it: rows of memory, whose elements are neighbours, or their transpose. One stride is 1.
// The rows may be those of an index, so that nobody has to copy them first: row r is memory.row(index[r] / divisor).
template <class T>
struct GemmOperand {
  ConstMatrixView<T> memory;  // with an index, `rows` is how many it has
  bool is_transposed = false;
  const int64_t* index = nullptr;
  int64_t divisor = 1;

  MAXMOE_INLINE GemmOperand(ConstMatrixView<T> matrix)  // NOLINT(google-explicit-constructor): matrices are operands
      : memory(matrix.column_stride == 1 ? matrix : matrix.transposed()), is_transposed(matrix.column_stride != 1) {}
  MAXMOE_INLINE GemmOperand(ConstMatrixView<T> source, const int64_t* row_index, int64_t index_divisor, int64_t count)
      : memory(source), index(row_index), divisor(index_divisor) {
    memory.rows = count;
  }

  MAXMOE_INLINE const T* memory_row(int64_t r) const { return memory.row(index == nullptr ? r : index[r] / divisor); }
  MAXMOE_INLINE int64_t rows() const { return is_transposed ? memory.columns : memory.rows; }
  MAXMOE_INLINE int64_t columns() const { return is_transposed ? memory.rows : memory.columns; }
  MAXMOE_INLINE GemmOperand row_range(int64_t begin, int64_t end) const {
    GemmOperand operand = *this;
    if (is_transposed) {
      operand.memory = memory.column_range(begin, end);
    } else if (index != nullptr) {
      operand.index = index + begin;
      operand.memory.rows = end - begin;
    } else {
      operand.memory = memory.row_range(begin, end);
    }
    return operand;
  }
  MAXMOE_INLINE GemmOperand transposed() const {
    GemmOperand operand = *this;
    operand.is_transposed = !is_transposed;
    return operand;
  }
};

// A right-hand side and its result: c = a * b, or c += a * b.
template <class T>
struct Product {
  GemmOperand<T> b = ConstMatrixView<T>{};
  MatrixView<T> c = {};
  bool accumulate = false;
  ConstMatrixView<T> next_b = {};  // of the product after this one: its first block is prefetched; may be empty
};

// c = a * b, or c += a * b, c row-major. Sums are in Accumulator<T>, rounded once to T. Runs on the calling thread. Any
// size, empty ones included.
template <class T>
class Gemm {
 public:
  Gemm() = default;
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;
  virtual ~Gemm() = default;

  // Whether the bits of a row may depend on the rows and columns that are multiplied with it.
  virtual bool bits_depend_on_tiles() const = 0;

  // Several products of one a, which is packed once where that is how products are computed.
  virtual void multiply(GemmOperand<T> a, const Product<T>* products, int64_t count) const = 0;

  MAXMOE_INLINE void multiply(GemmOperand<T> a, const Product<T>& product) const { multiply(a, &product, 1); }
};

}  // namespace maxmoe
