#include "cuda/launch.h"

namespace maxmoe::cuda {
namespace {

// The first block also sums the sizes of the groups.
__global__ void __launch_bounds__(kThreads) check_values(const PlanValues plan) {
  MAXMOE_SHARED_MEMORY(memory);
  const int64_t threads = int64_t{gridDim.x} * blockDim.x;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t i = thread; i < plan.slots_size; i += threads) {
    MAXMOE_DEVICE_CHECK(plan.slots[i] >= -1 && plan.slots[i] < plan.num_slots,
                        "maxmoe: a value of plan.slots is out of range (-1 or a slot of T * K)");
  }
  for (int64_t i = thread; i < plan.rows_size; i += threads) {
    MAXMOE_DEVICE_CHECK(plan.rows[i] >= -1 && plan.rows[i] < plan.num_rows,
                        "maxmoe: a value of plan.rows is out of range (-1 or one of R rows)");
  }
  if (blockIdx.x > 0) return;
  int64_t total = 0;
  for (int64_t first = 0; first < plan.num_groups; first += blockDim.x) {
    const int64_t group = first + threadIdx.x;
    const int64_t size = group < plan.num_groups ? plan.group_sizes[group] : 0;
    MAXMOE_DEVICE_CHECK(size >= 0 && size <= plan.num_rows, "maxmoe: a value of group_sizes does not fit the rows");
    total += block_inclusive_sum(size, reinterpret_cast<int64_t*>(memory)).of_block;
  }
  MAXMOE_DEVICE_CHECK(total <= plan.num_rows, "maxmoe: group_sizes must sum to at most the number of rows");
}

}  // namespace

void check_plan(const PlanValues& plan, Stream stream) {
  const int64_t values = std::max(plan.slots_size, plan.rows_size);
  const dim3 grid = grid_of(std::max<int64_t>(values, 1), 4 * kThreads);
  launch("check_plan", check_values, grid, kThreads, kWarpsPerBlock * sizeof(int64_t), stream, plan);
}

}  // namespace maxmoe::cuda
