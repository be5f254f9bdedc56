#include "cuda/launch.h"

namespace maxmoe::cuda {
namespace {

// A thread sums its columns of all rows of a group, in the order of the index.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1) sum_rows(const RaggedGatherReduce<T> a) {
  for (int64_t group = first_row_of_thread(); group < a.out.rows; group += rows_of_all_blocks()) {
    const int64_t begin = group * a.group_size;
    const int64_t end = begin + a.group_size;
    for (int64_t c = int64_t{threadIdx.x} * kWidth; c < a.out.columns; c += int64_t{blockDim.x} * kWidth) {
      Accumulator<T> sums[kWidth] = {};
#pragma unroll 4
      for (int64_t j = begin; j < end; ++j) {
        const int64_t source = a.index[j];
        MAXMOE_DEVICE_CHECK(source >= -1 && source < a.rows.rows,
                            "maxmoe::ragged_gather_reduce: a value of index is out of range (-1 or a row of rows)");
        if (source < 0 || (a.valid != nullptr && !a.valid[j])) continue;
        const Accumulator<T> weight = a.weights == nullptr ? Accumulator<T>(1) : a.weights[j];
        T values[kWidth];
        load(a.rows.row(source) + c, values);
        MAXMOE_UNROLL
        for (int i = 0; i < kWidth; ++i) sums[i] += weight * to_wide(values[i]);
      }
      T values[kWidth];
      MAXMOE_UNROLL
      for (int i = 0; i < kWidth; ++i) values[i] = to_narrow<T>(sums[i]);
      store(a.out.row(group) + c, values);
    }
  }
}

}  // namespace

template <class T>
void ragged_gather_reduce(const RaggedGatherReduce<T>& a, Stream stream) {
  if (a.out.rows == 0 || a.out.columns == 0) return;
  with_width<T>(is_aligned(a.rows) && is_aligned(a.out), [&]<int kWidth>() {
    const dim3 threads = block_of_rows(a.out.columns / kWidth);
    launch("ragged_gather_reduce", sum_rows<T, kWidth>, grid_of(a.out.rows, threads.y), threads, 0, stream, a);
  });
}

MAXMOE_INSTANTIATE_CUDA(ragged_gather_reduce, RaggedGatherReduce)

}  // namespace maxmoe::cuda
