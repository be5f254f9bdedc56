// A stable counting sort of the slots by expert. The slots are cut into chunks, one for each warp: a warp counts its
// slots of each expert, the counts are summed over chunks and experts, and the warp then assigns rows to its slots in
// order.
#include "cuda/launch.h"

namespace maxmoe::cuda {
namespace {

// Longer chunks with many experts, so that the counts of all chunks take at most 4 numbers for each slot.
int64_t slots_per_chunk(int64_t num_local_experts) {
  constexpr int64_t kSlots = 256;
  return std::max(kSlots, (num_local_experts / 4 + kWarp - 1) / kWarp * kWarp);
}

int64_t number_of_chunks(int64_t num_slots, int64_t num_local_experts) {
  const int64_t size = slots_per_chunk(num_local_experts);
  return (num_slots + size - 1) / size;
}

struct Chunks {
  int64_t size;
  int64_t count;
  int64_t* counts;  // [L, count], slots of each expert and chunk, then rows of its expert before the chunk
};

// The position of a slot's expert among the local ones, or -1.
__device__ int64_t local_expert(const RaggedPlan& plan, int64_t slot) {
  const int64_t expert = plan.experts[slot];
  MAXMOE_DEVICE_CHECK(expert >= -1 && expert < plan.num_experts,
                      "maxmoe::ragged_plan: a value of experts is out of range (-1 or one of num_experts)");
  const int64_t local = expert - plan.first_expert;
  return expert >= 0 && local >= 0 && local < plan.num_local_experts ? local : -1;
}

// Calls visit(slot, local, peers) for the slots of a chunk, 32 at a time: peers has the lanes with the same expert. The
// lanes past the last slot have no expert. Writes of a lane are visible to all lanes in the next call.
template <class Visit>
__device__ void visit_slots(const RaggedPlan& plan, const Chunks& chunks, int64_t chunk, const Visit& visit) {
  const int64_t begin = chunk * chunks.size;
  const int64_t end = begin + chunks.size < plan.num_slots ? begin + chunks.size : plan.num_slots;
  for (int64_t first = begin; first < end; first += kWarp) {
    const int64_t slot = first + lane_index();
    const int64_t local = slot < end ? local_expert(plan, slot) : -1;
    const uint32_t peers = __match_any_sync(kAllLanes, local);
    visit(slot, local, peers);
    __syncwarp();
  }
}

__device__ bool is_first(uint32_t peers) {
  return (peers & ((1U << lane_index()) - 1)) == 0;
}

__global__ void __launch_bounds__(kThreads, 1) count_slots(const RaggedPlan plan, const Chunks chunks) {
  for (int64_t chunk = first_item_of_warp(); chunk < chunks.count; chunk += items_of_all_warps()) {
    int64_t* const counts = chunks.counts + chunk;
    for (int64_t e = lane_index(); e < plan.num_local_experts; e += kWarp) counts[e * chunks.count] = 0;
    __syncwarp();
    visit_slots(plan, chunks, chunk, [&](int64_t /*slot*/, int64_t local, uint32_t peers) {
      if (local >= 0 && is_first(peers)) counts[local * chunks.count] += __popc(peers);
    });
  }
}

// A warp for each expert: the sums over the chunks before each chunk. group_sizes is the number of slots of the expert.
__global__ void __launch_bounds__(kThreads, 1) sum_chunks(const RaggedPlan plan, const Chunks chunks) {
  for (int64_t e = first_item_of_warp(); e < plan.num_local_experts; e += items_of_all_warps()) {
    int64_t* const counts = chunks.counts + e * chunks.count;
    int64_t total = 0;
    for (int64_t first = 0; first < chunks.count; first += kWarp) {
      const int64_t chunk = first + lane_index();
      const int64_t count = chunk < chunks.count ? counts[chunk] : 0;
      const int64_t sum = warp_inclusive_sum(count);
      if (chunk < chunks.count) counts[chunk] = total + sum - count;
      total += __shfl_sync(kAllLanes, sum, kWarp - 1);
    }
    if (lane_index() == 0) plan.group_sizes[e] = total;
  }
}

constexpr int kMaxSumThreads = 1024;

// One block: the sums over the experts, cut off at the limit of rows.
__global__ void __launch_bounds__(kMaxSumThreads) sum_experts(const RaggedPlan plan) {
  MAXMOE_SHARED_MEMORY(memory);
  auto* const sums_of_warps = reinterpret_cast<int64_t*>(memory);
  const int64_t limit = plan.max_rows < 0 ? plan.num_slots : plan.max_rows;
  int64_t total = 0;
  for (int64_t first = 0; first < plan.num_local_experts; first += blockDim.x) {
    const int64_t e = first + threadIdx.x;
    const int64_t size = e < plan.num_local_experts ? plan.group_sizes[e] : 0;
    const BlockSum sum = block_inclusive_sum(size, sums_of_warps);
    const int64_t end = total + sum.inclusive;
    if (e < plan.num_local_experts) {
      const int64_t left = limit - (end - size);
      plan.first_rows[e] = end - size;
      plan.group_sizes[e] = left < 0 ? 0 : left < size ? left : size;
    }
    total += sum.of_block;
  }
  if (threadIdx.x != 0) return;
  const int64_t kept = total < limit ? total : limit;
  MAXMOE_DEVICE_CHECK(kept <= plan.num_rows, "maxmoe::ragged_plan: num_rows must be at least the number of rows");
  plan.first_rows[plan.num_local_experts] = kept;
  *plan.dropped = total - kept;
}

__global__ void __launch_bounds__(kThreads, 1) assign_rows(const RaggedPlan plan, const Chunks chunks) {
  const int64_t kept = plan.first_rows[plan.num_local_experts];
  for (int64_t chunk = first_item_of_warp(); chunk < chunks.count; chunk += items_of_all_warps()) {
    int64_t* const counts = chunks.counts + chunk;
    visit_slots(plan, chunks, chunk, [&](int64_t slot, int64_t local, uint32_t peers) {
      int64_t row = kept;
      if (local >= 0) {
        const int rank = __popc(peers & ((1U << lane_index()) - 1));
        row = plan.first_rows[local] + counts[local * chunks.count] + rank;
      }
      __syncwarp();  // all lanes have read the count
      if (local >= 0 && is_first(peers)) counts[local * chunks.count] += __popc(peers);
      if (row < kept) plan.slots[row] = slot;
      const bool is_slot = slot < plan.num_slots && slot < (chunk + 1) * chunks.size;
      if (is_slot && plan.rows != nullptr) plan.rows[slot] = row < kept ? row : -1;
    });
  }
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  for (int64_t row = kept + thread; row < plan.num_rows; row += int64_t{gridDim.x} * blockDim.x) plan.slots[row] = -1;
}

}  // namespace

int64_t ragged_plan_scratch(int64_t num_slots, int64_t num_local_experts) {
  return num_local_experts * number_of_chunks(num_slots, num_local_experts);
}

void ragged_plan(const RaggedPlan& plan, Stream stream) {
  constexpr const char* op = "ragged_plan";
  const int64_t count = number_of_chunks(plan.num_slots, plan.num_local_experts);
  const Chunks chunks{slots_per_chunk(plan.num_local_experts), count, plan.scratch};
  if (count > 0) {
    launch(op, count_slots, grid_of(count, kWarpsPerBlock), kThreads, 0, stream, plan, chunks);
  }
  if (plan.num_local_experts > 0) {
    launch(op, sum_chunks, grid_of(plan.num_local_experts, kWarpsPerBlock), kThreads, 0, stream, plan, chunks);
  }
  const auto warps = static_cast<unsigned>(
      std::clamp<int64_t>((plan.num_local_experts + kWarp - 1) / kWarp, 1, kMaxSumThreads / kWarp));
  launch(op, sum_experts, 1, warps * kWarp, warps * sizeof(int64_t), stream, plan);
  const int64_t blocks = std::max<int64_t>({1, count, plan.num_rows / kThreads / 4});
  launch(op, assign_rows, grid_of(blocks, kWarpsPerBlock), kThreads, 0, stream, plan, chunks);
}

}  // namespace maxmoe::cuda
