#include "cuda/launch.h"

namespace maxmoe::cuda {
namespace {

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) gather_rows(const RaggedGather<T> a) {
  for (int64_t row = first_row_of_thread(); row < a.out.rows; row += rows_of_all_blocks()) {
    const int64_t source = a.index[row];
    MAXMOE_DEVICE_CHECK(source >= -1 && source < a.x.rows,
                        "maxmoe::ragged_gather: a value of index is out of range (-1 or a row of x)");
    const bool has_row = source >= 0 && row >= a.start && row < a.end;
    for (int64_t c = int64_t{threadIdx.x} * kWidth; c < a.out.columns; c += int64_t{blockDim.x} * kWidth) {
      T values[kWidth] = {};
      if (has_row) {
        load(a.x.row(source) + c, values);
        if (a.weights != nullptr) {
          MAXMOE_UNROLL
          for (int i = 0; i < kWidth; ++i) values[i] = to_narrow<T>(a.weights[row] * to_wide(values[i]));
        }
      }
      store(a.out.row(row) + c, values);
    }
  }
}

}  // namespace

template <class T>
void ragged_gather(const RaggedGather<T>& a, Stream stream) {
  if (a.out.rows == 0 || a.out.columns == 0) return;
  with_width<T>(is_aligned(a.x) && is_aligned(a.out), [&]<int kWidth>() {
    const dim3 threads = block_of_rows(a.out.columns / kWidth);
    launch("ragged_gather", gather_rows<T, kWidth>, grid_of(a.out.rows, threads.y), threads, 0, stream, a);
  });
}

MAXMOE_INSTANTIATE_CUDA(ragged_gather, RaggedGather)

}  // namespace maxmoe::cuda
