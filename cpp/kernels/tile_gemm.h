// The matrix product of this library: runs from registers, at the speed of the processor, for every size.
#pragma once

#include "dtype.h"
#include "executor.h"
#include "gemm.h"

namespace maxmoe {

// c = a * b, or c += a * b: see Gemm. An element of c is one chain of multiply-adds along the inner dimension, so its
// bits depend on its row of a and its column of b alone: not on the rows beside it, nor on how it is cut into tiles.
// (Products of bfloat16 pairs are used from some rows on: those of few rows may round otherwise.)
template <class T>
struct TileGemm {
  ConstMatrixView<T> a;
  ConstMatrixView<T> b;
  MatrixView<T> c;
  bool accumulate;
};

}  // namespace maxmoe

MAXMOE_KERNEL(tile_gemm, TileGemm)

#if !defined(MAXMOE_ISA_NAMESPACE)
namespace maxmoe {

// tile_gemm behind the interface of the kernels.
template <class T>
class KernelGemm final : public Gemm<T> {
 public:
  void multiply(ConstMatrixView<T> a, ConstMatrixView<T> b, MatrixView<T> c, bool accumulate) const override {
    tile_gemm(TileGemm<T>{a, b, c, accumulate}, SerialExecutor());
  }
};

}  // namespace maxmoe
#endif
