#include "convert.h"

#include "row.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

template <class T>
void widen_matrix(const Widen<T>& a, const Executor& executor) {
  if (a.source.column_stride != 1)
    return widen_matrix(Widen<T>{a.source.transposed(), a.target.transposed()}, executor);
  run_ranges(executor, a.source.rows, rows_per_task(a.source.columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) widen_row(a.source.row(r), a.target.row(r), a.source.columns);
  });
}

template <class T>
void narrow_matrix(const Narrow<T>& a, const Executor& executor) {
  run_ranges(executor, a.source.rows, rows_per_task(a.source.columns), [&](int64_t begin, int64_t end) {
    for (int64_t r = begin; r < end; ++r) narrow_row<T>(a.source.row(r), a.target.row(r), a.source.columns);
  });
}

MAXMOE_INSTANTIATE(widen_matrix, Widen)
MAXMOE_INSTANTIATE(narrow_matrix, Narrow)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
