#include "cuda/launch.h"

namespace maxmoe::cuda {
namespace {

// A warp computes one product: lane i adds the products of vectors i, i + 32, ..., then the lanes are summed.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) multiply_rows(const RaggedDot<T> d) {
  const int64_t columns = d.a.columns;
  for (int64_t j = first_item_of_warp(); j < d.index_size; j += items_of_all_warps()) {
    const int64_t source = d.index[j];
    MAXMOE_DEVICE_CHECK(source >= -1 && source < d.b.rows,
                        "maxmoe::ragged_dot: a value of index is out of range (-1 or a row of b)");
    Accumulator<T> sum = 0;
    if (source >= 0) {
      const T* const a = d.a.row(j / d.group_size);
      const T* const b = d.b.row(source);
      for (int64_t c = lane_index() * kWidth; c < columns; c += kWarp * kWidth) {
        T left[kWidth];
        T right[kWidth];
        load(a + c, left);
        load(b + c, right);
        MAXMOE_UNROLL
        for (int i = 0; i < kWidth; ++i) sum += to_wide(left[i]) * to_wide(right[i]);
      }
    }
    sum = warp_sum(sum);
    if (lane_index() == 0) d.out[j] = sum;
  }
}

}  // namespace

template <class T>
void ragged_dot(const RaggedDot<T>& d, Stream stream) {
  if (d.index_size == 0) return;
  with_width<T>(is_aligned(d.a) && is_aligned(d.b), [&]<int kWidth>() {
    launch("ragged_dot", multiply_rows<T, kWidth>, grid_of(d.index_size, kWarpsPerBlock), kThreads, 0, stream, d);
  });
}

MAXMOE_INSTANTIATE_CUDA(ragged_dot, RaggedDot)

}  // namespace maxmoe::cuda
