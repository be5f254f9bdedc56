#include "kernels/rows/ragged_sort.h"

#include "kernels/matrix/row.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Bound by the bandwidth of memory: a row is read and written with one multiplication per element.
template <class T>
void ragged_sort(const RaggedSort<T>& a, const Executor& executor) {
  const int64_t columns = a.x.columns;
  run_ranges(executor, a.rows.rows, rows_per_task(columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) {
      const T* token = a.x.row(a.slots[r] / a.top_k);
      if (a.weights == nullptr) {
        copy_row(token, a.rows.row(r), columns);
      } else {
        scale_row(token, a.weights[a.slots[r]], a.rows.row(r), columns);
      }
    }
  });
}

MAXMOE_INSTANTIATE(ragged_sort, RaggedSort)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
