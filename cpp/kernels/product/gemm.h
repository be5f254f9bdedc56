// The interface of the matrix product that the kernels are built on. Its implementation is tile_gemm, or for bfloat16
// on processors with matrix units product/amx.
#pragma once

#include "kernels/matrix/matrix_view.h"
#include "kernels/quantized/quantized_matrix.h"

namespace maxmoe {

// An operand of a product: a matrix whose rows are contiguous in memory, or the transpose of one. One of its two
// strides is 1. With an index, row r is memory.row(index[r] / divisor), so that tokens need not be gathered before the
// product. The right-hand side may be quantized: then `memory` has a shape, but no elements.
template <class T>
struct GemmOperand {
  ConstMatrixView<T> memory;  // with an index, `rows` is the number of its entries
  bool is_transposed = false;
  const int64_t* index = nullptr;
  int64_t divisor = 1;
  QuantizedMatrix quantized = {};

  MAXMOE_INLINE GemmOperand() = default;

  // A matrix in either layout: a matrix with contiguous columns is stored as its transpose.
  MAXMOE_INLINE GemmOperand(ConstMatrixView<T> matrix)  // NOLINT(google-explicit-constructor): matrices are operands
      : memory(matrix.column_stride == 1 ? matrix : matrix.transposed()), is_transposed(matrix.column_stride != 1) {}
  // The rows of `source` that `count` entries of an index select. With a divisor of K, the index holds slots.
  MAXMOE_INLINE GemmOperand(ConstMatrixView<T> source, const int64_t* row_index, int64_t index_divisor, int64_t count)
      : memory(source), index(row_index), divisor(index_divisor) {
    memory.rows = count;
  }
  MAXMOE_INLINE GemmOperand(const QuantizedMatrix& matrix, bool is_read_transposed)
      : memory{nullptr, matrix.rows, matrix.columns, 0}, is_transposed(is_read_transposed), quantized(matrix) {}

  MAXMOE_INLINE bool is_quantized() const { return quantized.data != nullptr; }
  // Row r of `memory`, or of its index: a row of the operand, or a column if the operand is transposed.
  MAXMOE_INLINE const T* memory_row(int64_t r) const { return memory.row(index == nullptr ? r : index[r] / divisor); }
  MAXMOE_INLINE int64_t rows() const { return is_transposed ? memory.columns : memory.rows; }
  MAXMOE_INLINE int64_t columns() const { return is_transposed ? memory.rows : memory.columns; }
  MAXMOE_INLINE GemmOperand row_range(int64_t begin, int64_t end) const {
    return is_transposed ? memory_columns(begin, end) : memory_rows(begin, end);
  }
  MAXMOE_INLINE GemmOperand column_range(int64_t begin, int64_t end) const {
    return is_transposed ? memory_rows(begin, end) : memory_columns(begin, end);
  }
  MAXMOE_INLINE GemmOperand transposed() const {
    GemmOperand operand = *this;
    operand.is_transposed = !is_transposed;
    return operand;
  }

 private:
  MAXMOE_INLINE GemmOperand memory_rows(int64_t begin, int64_t end) const {
    if (is_quantized()) return {quantized.row_range(begin, end), is_transposed};
    GemmOperand operand = *this;
    if (index != nullptr) {
      // Rows of an index are selected in the index. The matrix that they are read from stays whole.
      operand.index = index + begin;
      operand.memory.rows = end - begin;
    } else {
      operand.memory = memory.row_range(begin, end);
    }
    return operand;
  }
  MAXMOE_INLINE GemmOperand memory_columns(int64_t begin, int64_t end) const {
    if (is_quantized()) return {quantized.column_range(begin, end), is_transposed};
    GemmOperand operand = *this;
    operand.memory = memory.column_range(begin, end);
    return operand;
  }
};

// Matrices of one shape, one per group, that are operands of products: in the type of the product, or quantized.
template <class T>
struct WeightStack {
  ConstMatrixStack<T> matrices;
  QuantizedStack quantized = {};

  WeightStack() = default;
  MAXMOE_INLINE WeightStack(ConstMatrixStack<T> stack)  // NOLINT(google-explicit-constructor): matrices are weights
      : matrices(stack) {}
  MAXMOE_INLINE explicit WeightStack(const QuantizedStack& stack) : quantized(stack) {}

  MAXMOE_INLINE GemmOperand<T> operator[](int64_t index) const {
    if (!quantized.empty()) return {quantized[index], quantized.is_transposed};
    return matrices[index];
  }
  MAXMOE_INLINE int64_t count() const { return quantized.empty() ? matrices.count : quantized.count; }
  MAXMOE_INLINE int64_t rows() const {
    if (quantized.empty()) return matrices.first.rows;
    return quantized.is_transposed ? quantized.first.columns : quantized.first.rows;
  }
  MAXMOE_INLINE int64_t columns() const {
    if (quantized.empty()) return matrices.first.columns;
    return quantized.is_transposed ? quantized.first.rows : quantized.first.columns;
  }
  MAXMOE_INLINE bool empty() const { return matrices.empty() && quantized.empty(); }
};

// The right-hand side and the result of a product: c = a * b, or c += a * b.
//
// With low-rank factors a term is added, as more steps of the inner dimension: c = a * b + reduced * expand. `reduced`
// may be the result of an earlier product of the same call.
template <class T>
struct Product {
  GemmOperand<T> b = {};
  MatrixView<T> c = {};
  bool accumulate = false;
  bool is_nontemporal = false;      // c is written past the caches where its cache lines are written whole
  GemmOperand<T> next_b = {};       // b of the next product, whose first block is prefetched; may be empty
  ConstMatrixView<T> reduced = {};  // [rows, r]; r is 0 without factors
  ConstMatrixView<T> expand = {};   // [r, columns]

  MAXMOE_INLINE bool has_low_rank_term() const { return reduced.columns > 0; }
};

// Computes c = a * b or c += a * b, plus the low-rank term of a product, with c row-major. Sums are accumulated in
// Accumulator<T> and rounded once to T. Runs on the calling thread. Any size is valid, empty matrices included.
template <class T>
class Gemm {
 public:
  Gemm() = default;
  Gemm(const Gemm&) = delete;
  Gemm& operator=(const Gemm&) = delete;
  virtual ~Gemm() = default;

  // Computes several products with the same a, one after the other. An implementation that packs a packs it once for
  // all of them.
  virtual void multiply(GemmOperand<T> a, const Product<T>* products, int64_t count) const = 0;

  MAXMOE_INLINE void multiply(GemmOperand<T> a, const Product<T>& product) const { multiply(a, &product, 1); }
};

}  // namespace maxmoe
