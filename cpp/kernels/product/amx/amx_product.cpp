#include "kernels/product/amx/amx_product.h"

namespace maxmoe {

bool multiply_with_amx(const TileGemm<BFloat16>& products) {
  switch (active_isa()) {
#if defined(__x86_64__) && !defined(MAXMOE_WITHOUT_amx)
    case Isa::amx:
      amx::multiply_with_tiles(products);
      return true;
#endif
    case Isa::amx_emulated:
      amx_emulated::multiply_with_tiles(products);
      return true;
    default:
      return false;
  }
}

}  // namespace maxmoe
