// The matrix product of this library, for all types, every size, and either layout of a and b.
#pragma once

#include "dtype.h"
#include "executor.h"
#include "gemm.h"

namespace maxmoe {

// c = a * b, or c += a * b: see Gemm. An element of c is one chain of multiply-adds along the inner dimension, so its
// bits depend on its row of a and its column of b alone, not on the other rows, nor on how c is cut into tiles.
template <class T>
struct TileGemm {
  GemmOperand<T> a;
  GemmOperand<T> b;
  MatrixView<T> c;
  bool accumulate;
  const Product<T>* second = nullptr;  // of the same a
};

}  // namespace maxmoe

MAXMOE_KERNEL(tile_gemm, TileGemm)

#if !defined(MAXMOE_ISA_NAMESPACE)
namespace maxmoe {

// tile_gemm as the Gemm that other kernels are given.
template <class T>
class KernelGemm final : public Gemm<T> {
 public:
  void multiply(GemmOperand<T> a, GemmOperand<T> b, MatrixView<T> c, bool accumulate) const override {
    tile_gemm(TileGemm<T>{a, b, c, accumulate}, SerialExecutor());
  }
  void multiply_both(GemmOperand<T> a, const Product<T>& first, const Product<T>& second) const override {
    tile_gemm(TileGemm<T>{a, first.b, first.c, first.accumulate, &second}, SerialExecutor());
  }
};

}  // namespace maxmoe
#endif
