#include "kernels/rows/ragged_scatter_add.h"

#include "kernels/matrix/row.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Stable counting sort: order[offsets[n] .. offsets[n + 1]) lists the j with index[j] == n in ascending order.
// offsets[n] is first the number of these j, then the end of their range. The last loop fills each range from its end,
// which moves offsets[n] to the beginning.
template <class T>
void invert_index(const RaggedScatterAdd<T>& a, int64_t* offsets, int64_t* order) {
  zero_row(offsets, a.out.rows + 1);
  for (int64_t j = 0; j < a.index_size; ++j) {
    if (a.index[j] >= 0) ++offsets[a.index[j]];
  }
  int64_t total = 0;
  for (int64_t n = 0; n < a.out.rows; ++n) {
    total += offsets[n];
    offsets[n] = total;
  }
  offsets[a.out.rows] = total;
  for (int64_t j = a.index_size - 1; j >= 0; --j) {
    if (a.index[j] >= 0) order[--offsets[a.index[j]]] = j;
  }
}

// Computes row n of out by gathering the rows of its slots, so that no two tasks write the same row.
template <class T>
void add_rows(const RaggedScatterAdd<T>& a, const int64_t* slots, int64_t num_slots, int64_t n) {
  const auto index_of = [&](int64_t i) { return slots[i] / a.group_size; };
  const auto weight_of = [&](int64_t i) { return a.weights == nullptr ? Accumulator<T>(1) : a.weights[slots[i]]; };
  sum_weighted_rows<T>(a.rows, num_slots, index_of, weight_of, a.out.row(n));
}

}  // namespace

template <class T>
void ragged_scatter_add(const RaggedScatterAdd<T>& a, const Executor& executor) {
  int64_t* const offsets = a.scratch;
  int64_t* const order = offsets + a.out.rows + 1;
  invert_index(a, offsets, order);
  run_ranges(executor, a.out.rows, rows_per_task(a.out.columns), [&](int64_t begin, int64_t end) {
    for (int64_t n = begin; n < end; ++n) add_rows(a, order + offsets[n], offsets[n + 1] - offsets[n], n);
  });
}

MAXMOE_INSTANTIATE(ragged_scatter_add, RaggedScatterAdd)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
