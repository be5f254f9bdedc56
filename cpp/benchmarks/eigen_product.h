// Eigen's matrix product, compiled once per instruction set as the kernels are.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/matrix_view.h"

namespace maxmoe {

// c = a * b, as in TileGemm. T is float or double: Eigen's products of 16-bit types are slower.
template <class T>
struct EigenProduct {
  ConstMatrixView<T> a;
  ConstMatrixView<T> b;
  MatrixView<T> c;
};

}  // namespace maxmoe

MAXMOE_KERNEL(eigen_product, EigenProduct)
