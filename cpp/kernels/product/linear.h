// Linear map of rows. Operands and result may have different dtypes; products and sums are in one dtype.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/dtype.h"
#include "kernels/product/gemm.h"

namespace maxmoe {

enum class Dtype { float64, float32, bfloat16, float16 };

// A matrix whose dtype is known only at run time. `Data` is void or const void. Strides are in elements.
template <class Data>
struct AnyMatrix {
  Data* data = nullptr;
  Dtype dtype = Dtype::float32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 1;
};

// out = x * weight^T + bias, summed in T, which is float or double, and rounded once to the dtype of out; double is
// rounded to float first if out is in 16 bits. x and weight have one stride of 1 each. Operands in another dtype than T
// are converted block by block, in scratch memory.
template <class T>
struct Linear {
  AnyMatrix<const void> x;       // [T, D]
  AnyMatrix<const void> weight;  // [E, D]
  const T* bias;                 // [E] or null
  const Gemm<T>* gemm;
  AnyMatrix<void> out;  // [T, E], row-major
};

}  // namespace maxmoe

MAXMOE_KERNEL(linear, Linear)
