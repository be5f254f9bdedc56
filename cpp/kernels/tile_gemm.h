// The matrix product of this library, for all types, every size, and either layout of a and b.
#pragma once

#include "dtype.h"
#include "executor.h"
#include "gemm.h"

namespace maxmoe {

// The products of one a: see Gemm. An element of c is one chain of multiply-adds along the inner dimension, so its
// bits depend on its row of a and its column of b alone, not on the other rows, nor on how c is cut into tiles.
template <class T>
struct TileGemm {
  GemmOperand<T> a;
  const Product<T>* products;
  int64_t count;
};

}  // namespace maxmoe

MAXMOE_KERNEL(tile_gemm, TileGemm)

#if !defined(MAXMOE_ISA_NAMESPACE)
namespace maxmoe {

// tile_gemm as the Gemm that other kernels are given.
template <class T>
class KernelGemm final : public Gemm<T> {
 public:
  bool bits_depend_on_tiles() const override { return false; }

  using Gemm<T>::multiply;
  void multiply(GemmOperand<T> a, const Product<T>* products, int64_t count) const override {
    tile_gemm(TileGemm<T>{a, products, count}, SerialExecutor());
  }
};

}  // namespace maxmoe
#endif
