#include "ragged_gather.h"

#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

template <class T>
void ragged_gather(const RaggedGather<T>& a, const Executor& executor) {
  const int64_t columns = a.out.columns;
  const auto has_row = [&](int64_t i) { return a.start <= i && i < a.end && a.index[i] >= 0; };
  run_ranges(executor, a.out.rows, rows_per_task(columns), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + 1 < end && has_row(i + 1)) prefetch_row(a.x.row(a.index[i + 1]), columns);
      if (!has_row(i)) {
        zero_row(a.out.row(i), columns);
      } else if (a.weights == nullptr) {
        copy_row(a.x.row(a.index[i]), a.out.row(i), columns);
      } else {
        scale_row(a.x.row(a.index[i]), a.weights[i], a.out.row(i), columns);
      }
    }
  });
}

MAXMOE_INSTANTIATE(ragged_gather, RaggedGather)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
