// Dequantizes the matrices of a stack.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/dtype.h"
#include "kernels/quantized/quantized_matrix.h"

namespace maxmoe {

// out[l, r, c] = (lookup(code) - zero) * scale, one product in float, rounded to T. Rows are the rows of the codes,
// whether or not the stack is transposed.
template <class T>
struct Dequantize {
  QuantizedStack stack;
  T* out;  // [L, rows, columns], contiguous
};

}  // namespace maxmoe

MAXMOE_KERNEL(dequantize, Dequantize)
