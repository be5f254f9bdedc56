// Rows of codes, decoded to the type that a kernel computes in.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/row.simd.h"
#include "kernels/product/gemm.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Writes the elements of the given rows and columns of m to `out`. columns.begin is even if codes have 4 bits. The
// codes `ahead` bytes after each row are prefetched, none if `ahead` is 0.
template <class T>
void decode_rows(const QuantizedMatrix& m, Range rows, Range columns, MatrixView<T> out, int64_t ahead);

// A block of a quantized B as a separate operand, in scratch memory: [depth, columns], in the orientation of b.
template <class T>
GemmOperand<T> decoded_block(const GemmOperand<T>& b, Range depth, Range columns, int64_t ahead = 0) {
  const Range rows = b.is_transposed ? columns : depth;
  const Range in_row = b.is_transposed ? depth : columns;
  const int64_t stride = padded_stride<T>(in_row.size());
  const MatrixView<T> block{scratch<T>(kDecodedScratch, rows.size() * stride), rows.size(), in_row.size(), stride};
  decode_rows(b.quantized, rows, in_row, block, ahead);
  GemmOperand<T> operand(block.as_const());
  operand.is_transposed = b.is_transposed;
  return operand;
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
