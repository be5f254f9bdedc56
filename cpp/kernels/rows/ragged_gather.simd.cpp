#include "kernels/rows/ragged_gather.h"

#include "kernels/matrix/row.simd.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {
namespace {

// Results of this size and more are written with non-temporal stores. A smaller result may still be in the last-level
// cache when the next kernel reads it; the first rows of a larger result would be evicted by then.
constexpr int64_t kMinNonTemporalBytes = 16 << 20;

// target = weight * source; without a weight target = source.
template <class T>
void gather_block(const T* source, const Accumulator<T>* weight, T* target, int64_t columns, bool is_nontemporal) {
  if (!is_nontemporal) {
    return weight == nullptr ? copy_row(source, target, columns) : scale_row(source, *weight, target, columns);
  }
  return weight == nullptr ? copy_row_nontemporal(source, target, columns)
                           : scale_row_nontemporal(source, *weight, target, columns);
}

}  // namespace

// Bound by the bandwidth of memory, and by TLB misses if rows of 1 or 2 KiB are in random order (docs/performance.md).
template <class T>
void ragged_gather(const RaggedGather<T>& a, const Executor& executor) {
  const int64_t columns = a.out.columns;
  const bool is_nontemporal = a.out.rows * columns * static_cast<int64_t>(sizeof(T)) >= kMinNonTemporalBytes;
  const auto has_row = [&](int64_t i) { return a.start <= i && i < a.end && a.index[i] >= 0; };
  run_ranges(executor, a.out.rows, rows_per_task(columns), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (!has_row(i)) {
        zero_row(a.out.row(i), columns);
        continue;
      }
      const T* row = a.x.row(a.index[i]);
      // The next row is prefetched while this one is copied: its address is in the index, which hardware prefetchers
      // cannot follow.
      const T* next = i + 1 < end && has_row(i + 1) ? a.x.row(a.index[i + 1]) : row;
      const Accumulator<T>* weight = a.weights == nullptr ? nullptr : a.weights + i;
      // The row is copied in blocks, so that the prefetches of the next row are spread over the copy of this one: a
      // core keeps only one or two dozen cache misses outstanding. A block ends at the end of a cache line, so that no
      // line is written in two parts.
      int64_t size = 0;
      for (int64_t column = 0; column < columns; column += size) {
        T* target = a.out.row(i) + column;
        size = at_most(columns - column, kColumnBlock + elements_to_cache_line(target));
        prefetch_row(next + column, size);
        gather_block(row + column, weight, target, size, is_nontemporal);
      }
    }
    // Before the task ends, because another thread may read the rows next.
    fence_nontemporal_stores();
  });
}

MAXMOE_INSTANTIATE(ragged_gather, RaggedGather)

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
