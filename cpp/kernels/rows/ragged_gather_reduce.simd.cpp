#include "kernels/rows/ragged_gather_reduce.h"

#include "kernels/matrix/row.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Prefetches the first columns of all rows of a group, in total at most half of a first-level cache of 32 KiB. Hardware
// prefetchers follow the rest of longer rows.
template <class T>
void prefetch_group(const RaggedGatherReduce<T>& a, int64_t group) {
  constexpr int64_t kPrefetchedBytes = 16384;
  const int64_t columns = at_most(a.out.columns, kPrefetchedBytes / static_cast<int64_t>(sizeof(T)) / a.group_size);
  const int64_t* index = a.index + group * a.group_size;
  for (int64_t i = 0; i < a.group_size; ++i) {
    if (index[i] >= 0) prefetch_row(a.rows.row(index[i]), columns);
  }
}

template <class T>
void reduce_group(const RaggedGatherReduce<T>& a, int64_t group) {
  const int64_t first = group * a.group_size;
  const auto index_of = [&](int64_t i) { return a.valid != nullptr && !a.valid[first + i] ? -1 : a.index[first + i]; };
  const auto weight_of = [&](int64_t i) { return a.weights == nullptr ? Accumulator<T>(1) : a.weights[first + i]; };
  sum_weighted_rows<T>(a.rows, a.group_size, index_of, weight_of, a.out.row(group));
}

}  // namespace

template <class T>
void ragged_gather_reduce(const RaggedGatherReduce<T>& a, const Executor& executor) {
  run_ranges(executor, a.out.rows, rows_per_task(a.out.columns * a.group_size), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) {
      // The rows of the next group are prefetched while this group is summed: their addresses are in the index, which
      // hardware prefetchers cannot follow.
      if (group + 1 < end) prefetch_group(a, group + 1);
      reduce_group(a, group);
    }
  });
}

MAXMOE_INSTANTIATE(ragged_gather_reduce, RaggedGatherReduce)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
