#include "cuda/row_sums.h"

namespace maxmoe::cuda {
namespace {

// A thread sums its columns of all rows of a group, in the order of the index; with two matrices, of a row of each.
template <class T, int kWidth, int kMatrices, int kAhead>
__global__ void __launch_bounds__(kThreads, sizeof(T) == 8 ? 1 : 3)
    sum_rows(const RaggedGatherReduce<T> a, const ConstMatrixView<T> others) {
  for (int64_t group = first_row_of_thread(); group < a.out.rows; group += rows_of_all_blocks()) {
    const int64_t begin = group * a.group_size;
    for (int64_t c = int64_t{threadIdx.x} * kWidth; c < a.out.columns; c += int64_t{blockDim.x} * kWidth) {
      const auto index = [&](int64_t i) { return a.index[i / kMatrices]; };
      const auto term = [&](int64_t i, int64_t source) -> Term<T> {
        const int64_t j = i / kMatrices;
        MAXMOE_DEVICE_CHECK(source >= -1 && source < a.rows.rows,
                            "maxmoe::ragged_gather_reduce: a value of index is out of range (-1 or a row of rows)");
        if (source < 0 || (a.valid != nullptr && !a.valid[j])) return {};
        const T* const row = i % kMatrices == 0 ? a.rows.row(source) : others.row(source);
        return {row + c, a.weights == nullptr ? Accumulator<T>(1) : a.weights[j]};
      };
      Accumulator<T> sums[kWidth] = {};
      add_terms<T, kAhead>(sums, begin * kMatrices, (begin + a.group_size) * kMatrices, index, term);
      store_sums(a.out.row(group) + c, sums);
    }
  }
}

template <class T, int kMatrices, int kAhead = 4>
void sum(const RaggedGatherReduce<T>& a, const ConstMatrixView<T>& others, Stream stream) {
  if (a.out.rows == 0 || a.out.columns == 0) return;
  const bool is_vectorized = is_aligned(a.rows) && (kMatrices == 1 || is_aligned(others)) && is_aligned(a.out);
  with_width<T>(is_vectorized, [&]<int kWidth>() {
    const dim3 threads = block_of_rows(a.out.columns / kWidth);
    launch("ragged_gather_reduce", sum_rows<T, kWidth, kMatrices, kAhead>, grid_of(a.out.rows, threads.y), threads, 0,
           stream, a, others);
  });
}

}  // namespace

template <class T>
void ragged_gather_reduce(const RaggedGatherReduce<T>& a, Stream stream) {
  sum<T, 1>(a, {}, stream);
}
template <class T>
void ragged_gather_reduce_of_two(const RaggedGatherReduceOfTwo<T>& a, Stream stream) {
  sum<T, 2>(a.sums, a.others, stream);
}

MAXMOE_INSTANTIATE_CUDA(ragged_gather_reduce, RaggedGatherReduce)
MAXMOE_INSTANTIATE_CUDA(ragged_gather_reduce_of_two, RaggedGatherReduceOfTwo)

}  // namespace maxmoe::cuda
