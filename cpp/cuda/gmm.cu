#include "cuda/multiply_add_tiles.h"
#include "cuda/tensor_core_tiles.h"

namespace maxmoe::cuda {

template <class T>
void gmm(const Gmm<T>& a, Stream stream) {
  if (a.out.rows == 0 || a.out.columns == 0) return;
  if constexpr (sizeof(T) == 2) {
    tensor_core::run(a, stream);
  } else {
    multiply_add::run(a, stream);
  }
}

MAXMOE_INSTANTIATE_CUDA(gmm, Gmm)

}  // namespace maxmoe::cuda
