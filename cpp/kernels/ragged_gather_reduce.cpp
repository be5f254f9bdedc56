#include "ragged_gather_reduce.h"

#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// One sum, a block of columns at a time.
template <class T>
void reduce_group(const RaggedGatherReduce<T>& a, int64_t group) {
  const int64_t first = group * a.group_size;
  const int64_t last = first + a.group_size;
  for (int64_t begin = 0; begin < a.out.columns; begin += kColumnBlock) {
    const int64_t size = a.out.columns - begin < kColumnBlock ? a.out.columns - begin : kColumnBlock;
    Accumulator<T> sum[kColumnBlock];
    Accumulator<T> buffer[kColumnBlock];
    zero_row(sum, size);
    for (int64_t j = first; j < last; ++j) {
      if (a.index[j] < 0 || (a.valid != nullptr && !a.valid[j])) continue;
      const Accumulator<T> weight = a.weights == nullptr ? Accumulator<T>(1) : a.weights[j];
      const Accumulator<T>* row = widened(a.rows.row(a.index[j]) + begin, buffer, size);
      for (int64_t i = 0; i < size; ++i) sum[i] += weight * row[i];
    }
    narrow_row<T>(sum, a.out.row(group) + begin, size);
  }
}

}  // namespace

template <class T>
void ragged_gather_reduce(const RaggedGatherReduce<T>& a, const Executor& executor) {
  run_ranges(executor, a.out.rows, rows_per_task(a.out.columns * a.group_size), [&](int64_t begin, int64_t end) {
    for (int64_t group = begin; group < end; ++group) reduce_group(a, group);
  });
}

MAXMOE_INSTANTIATE(ragged_gather_reduce, RaggedGatherReduce)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
