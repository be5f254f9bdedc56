// Product of two matrices of any dtypes, summed in one.
#pragma once

#include "dtype.h"
#include "executor.h"
#include "gemm.h"

namespace maxmoe {

enum class Dtype { float64, float32, bfloat16, float16 };

// A matrix whose dtype is known at run time alone: `Data` is void or const void. Strides are in elements.
template <class Data>
struct AnyMatrix {
  Data* data = nullptr;
  Dtype dtype = Dtype::float32;
  int64_t rows = 0;
  int64_t columns = 0;
  int64_t row_stride = 0;
  int64_t column_stride = 1;
};

// out = a * b + bias, summed in T, which is float or double, and rounded once to the dtype of out. One stride of a and of
// b is 1. What is not in T is converted in blocks, in scratch memory.
template <class T>
struct Mm {
  AnyMatrix<const void> a;  // [M, K]
  AnyMatrix<const void> b;  // [K, N]
  const T* bias;            // [N] or null
  const Gemm<T>* gemm;
  AnyMatrix<void> out;  // [M, N], row-major
};

}  // namespace maxmoe

MAXMOE_KERNEL(mm, Mm)
