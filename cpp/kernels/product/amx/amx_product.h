// The product of bfloat16 matrices on the tile registers of AMX.
#pragma once

#include "kernels/product/tiled/tile_gemm.h"

namespace maxmoe {

// The variants of multiply_with_amx (amx_product.amx.cpp).
namespace amx {
void multiply_with_tiles(const TileGemm<BFloat16>& products);
}
namespace amx_emulated {
void multiply_with_tiles(const TileGemm<BFloat16>& products);
}

}  // namespace maxmoe
