// The matrix product of this library, for all types and sizes, and for either layout of a and b.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/dtype.h"
#include "kernels/product/gemm.h"

namespace maxmoe {

// The arguments of Gemm::multiply. An element of c is one chain of multiply-adds along the inner dimension. Its bits
// depend on its row of a and its column of b alone, not on the other rows, and not on the tiling.
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

// Computes the products on the tile registers of AMX (kernels/product/amx), if active_isa() has them; otherwise returns
// false.
bool multiply_with_amx(const TileGemm<BFloat16>& products);

// tile_gemm, on matrix units if there are any, behind the interface Gemm. Not for files that are compiled per
// instruction set: the table of virtual functions is a weak symbol.
template <class T>
class KernelGemm final : public Gemm<T> {
 public:
  using Gemm<T>::multiply;
  void multiply(GemmOperand<T> a, const Product<T>* products, int64_t count) const override {
    const TileGemm<T> all{a, products, count};
    if constexpr (std::is_same_v<T, BFloat16>) {
      if (multiply_with_amx(all)) return;
    }
    tile_gemm(all, SerialExecutor());
  }
};

}  // namespace maxmoe
#endif
