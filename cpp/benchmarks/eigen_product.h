// Eigen's matrix product, with the instruction set of the kernels.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix_view.h"

namespace maxmoe {

// c = a * b, as in TileGemm. T is float or double: Eigen's products of narrower types are slower than those.
template <class T>
struct EigenProduct {
  ConstMatrixView<T> a;
  ConstMatrixView<T> b;
  MatrixView<T> c;
};

}  // namespace maxmoe

MAXMOE_KERNEL(eigen_product, EigenProduct)
