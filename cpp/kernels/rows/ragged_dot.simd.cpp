#include "kernels/rows/ragged_dot.h"

#include "kernels/matrix/row.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Bound by the bandwidth of memory: two rows are read for each number that is written.
template <class T>
void ragged_dot(const RaggedDot<T>& d, const Executor& executor) {
  run_ranges(executor, d.index_size, rows_per_task(d.a.columns), [&](int64_t begin, int64_t end) {
    for (int64_t j = begin; j < end; ++j) {
      d.out[j] =
          d.index[j] < 0 ? Accumulator<T>(0) : dot_rows(d.a.row(j / d.group_size), d.b.row(d.index[j]), d.a.columns);
    }
  });
}

MAXMOE_INSTANTIATE(ragged_dot, RaggedDot)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
