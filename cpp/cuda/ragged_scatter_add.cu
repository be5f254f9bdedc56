// A plan with the rows of the result in the place of experts orders the slots by their row. Then each row of the result
// is the sum of its slots, in their order.
#include "cuda/row_sums.h"

namespace maxmoe::cuda {
namespace {

// Parts of the scratch memory.
struct Work {
  int64_t* first_slots;  // [N + 1], position in `slots` of the first slot of each row
  int64_t* slots;        // [M], ordered by row
  int64_t* group_sizes;  // [N]
  int64_t* dropped;      // [1]
  int64_t* plan;

  Work(int64_t* scratch, int64_t index_size, int64_t num_rows)
      : first_slots(scratch),
        slots(first_slots + num_rows + 1),
        group_sizes(slots + index_size),
        dropped(group_sizes + num_rows),
        plan(dropped + 1) {}
};

// Checks the index before the plan does, whose messages name another operator.
template <class T>
__global__ void __launch_bounds__(kThreads) check_index(const RaggedScatterAdd<T> a) {
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t j = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; j < a.index_size; j += threads) {
    MAXMOE_DEVICE_CHECK(a.index[j] >= -1 && a.index[j] < a.out.rows,
                        "maxmoe::ragged_scatter_add: a value of index is out of range (-1 or a row of the result)");
  }
}

// A thread sums its columns of all slots of a row.
template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads, 1) add_slots(const RaggedScatterAdd<T> a, const Work work) {
  for (int64_t row = first_row_of_thread(); row < a.out.rows; row += rows_of_all_blocks()) {
    const int64_t begin = work.first_slots[row];
    const int64_t end = work.first_slots[row + 1];
    for (int64_t c = int64_t{threadIdx.x} * kWidth; c < a.out.columns; c += int64_t{blockDim.x} * kWidth) {
      const auto slot_of = [&](int64_t i) { return work.slots[i]; };
      const auto term = [&](int64_t /*i*/, int64_t slot) -> Term<T> {
        return {a.rows.row(slot / a.group_size) + c, a.weights == nullptr ? Accumulator<T>(1) : a.weights[slot]};
      };
      Accumulator<T> sums[kWidth] = {};
      add_terms<T>(sums, begin, end, slot_of, term);
      store_sums(a.out.row(row) + c, sums);
    }
  }
}

}  // namespace

int64_t ragged_scatter_add_scratch(int64_t index_size, int64_t num_rows) {
  return 2 * num_rows + index_size + 2 + ragged_plan_scratch(index_size, num_rows);
}

template <class T>
void ragged_scatter_add(const RaggedScatterAdd<T>& a, Stream stream) {
  constexpr const char* op = "ragged_scatter_add";
  if (a.index_size > 0) launch(op, check_index<T>, grid_of(a.index_size, kThreads), kThreads, 0, stream, a);
  if (a.out.rows == 0 || a.out.columns == 0) return;
  const Work work(a.scratch, a.index_size, a.out.rows);
  ragged_plan(RaggedPlan{a.index, a.index_size, a.out.rows, 0, a.out.rows, -1, a.index_size, work.plan,
                         work.first_slots, work.slots, nullptr, work.group_sizes, work.dropped},
              stream);
  with_width<T>(is_aligned(a.rows) && is_aligned(a.out), [&]<int kWidth>() {
    const dim3 threads = block_of_rows(a.out.columns / kWidth);
    launch(op, add_slots<T, kWidth>, grid_of(a.out.rows, threads.y), threads, 0, stream, a, work);
  });
}

MAXMOE_INSTANTIATE_CUDA(ragged_scatter_add, RaggedScatterAdd)

}  // namespace maxmoe::cuda
