#include <ATen/TensorOperators.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/constant_pad_nd.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/searchsorted.h>

#include <algorithm>
#include <limits>
#include <tuple>

#include "kernels/routing/ragged_plan.h"
#include "ops/backend.h"
#include "ops/cuda_kernels.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/registration.h"
#include "ops/torch_internals.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kRaggedPlan = "ragged_plan";

using Plan = std::tuple<Tensor, Tensor, Tensor, Tensor>;

void check_ragged_plan(const Tensor& experts, int64_t num_experts, int64_t first_expert, int64_t num_local_experts,
                       std::optional<int64_t> max_rows) {
  Argument(kRaggedPlan, "experts", experts).has_dims(2, "[T, K]").is_int64();
  MAXMOE_CHECK(1 <= num_experts && num_experts < kLongestList, kRaggedPlan,
               "num_experts must be at least 1 and less than ", kLongestList, ", got ", num_experts);
  MAXMOE_CHECK(0 <= first_expert && first_expert <= num_experts, kRaggedPlan,
               "first_expert must be in [0, num_experts (", num_experts, ")], got ", first_expert);
  MAXMOE_CHECK(0 <= num_local_experts && num_local_experts <= num_experts - first_expert, kRaggedPlan,
               "num_local_experts must be in [0, num_experts - first_expert (", num_experts - first_expert, ")], got ",
               num_local_experts);
  MAXMOE_CHECK(max_rows.value_or(0) >= 0, kRaggedPlan, "max_rows must not be negative, got ", max_rows.value_or(0));
  Argument(kRaggedPlan, "experts", experts).has_values_in(-1, num_experts, "-1 or one of num_experts", kRaggedPlan);
}

// The number of rows R. Reading it from `kept` waits for the device, so the caller's num_rows has precedence; with
// max_rows and without num_rows, R is the minimum of max_rows and the number of slots.
int64_t count_rows(const Tensor& kept, std::optional<int64_t> num_rows, std::optional<int64_t> max_rows,
                   int64_t num_slots) {
  if (!num_rows.has_value() && max_rows.has_value()) num_rows = std::min(*max_rows, num_slots);
  if (!num_rows.has_value()) return kept.item<int64_t>();
  if (kept.is_cpu()) {
    const int64_t least = kept.item<int64_t>();
    MAXMOE_CHECK(*num_rows >= least, kRaggedPlan, "num_rows must be at least the number of rows (", least, "), got ",
                 *num_rows);
  } else if (*num_rows < num_slots) {
    torch_internals::assert_async(kept.le(*num_rows),
                                  "maxmoe::ragged_plan: num_rows must be at least the number of rows");
  }
  return *num_rows;
}

// [T * K]: the position of each slot's expert among the local ones, num_local_experts for other experts; in the
// narrowest type, because the time of a sort grows with the number of bytes.
Tensor sort_keys(const Tensor& experts, int64_t num_experts, int64_t first_expert, int64_t num_local_experts) {
  const bool fits_int16 = num_experts < std::numeric_limits<int16_t>::max();
  const bool fits_int32 = num_experts < std::numeric_limits<int32_t>::max();
  const Tensor ids = experts.reshape(-1).to(fits_int16 ? at::kShort : fits_int32 ? at::kInt : at::kLong);
  // remainder() turns -1 into num_local_experts.
  if (num_local_experts == num_experts) return ids.remainder(num_local_experts + 1);
  return ids.sub(first_expert).clamp_(-1, num_local_experts).remainder_(num_local_experts + 1);
}

// A stable sort by expert. Slots of other experts sort last. The group sizes stay on the device.
Plan ragged_plan_aten(const Tensor& experts, int64_t num_experts, int64_t first_expert, int64_t num_local_experts,
                      std::optional<int64_t> max_rows, std::optional<int64_t> known_rows) {
  const int64_t num_slots = experts.numel();
  const Tensor key = sort_keys(experts, num_experts, first_expert, num_local_experts);
  const auto [sorted, order] = key.sort(/*stable=*/std::optional(true), 0, /*descending=*/false);
  // [L + 1]: the first row of each expert, and the number of rows.
  const Tensor before_and_experts = at::arange(-1, num_local_experts, key.options());
  const Tensor wanted = at::searchsorted(sorted, before_and_experts, /*out_int32=*/false, /*right=*/true);
  const bool may_drop = max_rows.value_or(num_slots) < num_slots;
  const Tensor bounds = may_drop ? wanted.clamp_max(*max_rows) : wanted;
  const Tensor kept = bounds.select(0, num_local_experts);

  const int64_t num_rows = count_rows(kept, known_rows, max_rows, num_slots);
  const Tensor position = at::arange(num_slots, order.options());
  const Tensor is_left_out = position.ge(kept);
  const Tensor rows = at::empty_like(order).scatter_(0, order, position.masked_fill_(is_left_out, -1));
  Tensor slots = order.masked_fill(is_left_out, -1);
  // Truncated or padded to num_rows.
  if (num_rows != num_slots) slots = at::constant_pad_nd(slots, {0, num_rows - num_slots}, -1);
  return {slots, rows, bounds.diff(), wanted.select(0, num_local_experts) - kept};
}

// The kernel writes slots for the largest number of rows there can be; those past R are cut off.
Plan ragged_plan_cuda(const CudaKernels& kernels, const Tensor& experts, int64_t num_experts, int64_t first_expert,
                      int64_t num_local_experts, std::optional<int64_t> max_rows, std::optional<int64_t> known_rows) {
  const int64_t num_slots = experts.numel();
  const int64_t most_rows = std::max(num_slots, known_rows.value_or(0));
  const auto options = experts.options();
  const int64_t scratch_size = kernels.library->ragged_plan_scratch(num_slots, num_local_experts);
  const Tensor scratch = at::empty({scratch_size + num_local_experts + 1}, options);
  auto* const numbers = pointer<int64_t>(scratch);
  const Tensor slots = at::empty({most_rows}, options);
  const Tensor rows = at::empty({num_slots}, options);
  const Tensor group_sizes = at::empty({num_local_experts}, options);
  const Tensor dropped = at::empty({}, options);
  kernels.library->ragged_plan(
      {List(experts), num_slots, num_experts, first_expert, num_local_experts, max_rows.value_or(-1), most_rows,
       numbers, numbers + scratch_size, pointer<int64_t>(slots), pointer<int64_t>(rows), pointer<int64_t>(group_sizes),
       pointer<int64_t>(dropped)},
      kernels.stream);
  const Tensor kept = scratch.select(0, scratch_size + num_local_experts);
  return {slots.narrow(0, 0, count_rows(kept, known_rows, max_rows, num_slots)), rows, group_sizes, dropped};
}

Plan ragged_plan_backend(const Tensor& experts, int64_t num_experts, int64_t first_expert,
                         std::optional<int64_t> local_or_all, std::optional<int64_t> max_rows,
                         std::optional<int64_t> known_rows) {
  const int64_t num_local_experts = local_or_all.value_or(num_experts - first_expert);
  check_ragged_plan(experts, num_experts, first_expert, num_local_experts, max_rows);
  if (const auto cuda = cuda_kernels(experts, kRaggedPlan)) {
    return ragged_plan_cuda(*cuda, experts, num_experts, first_expert, num_local_experts, max_rows, known_rows);
  }
  if (path_of(experts, kRaggedPlan) == Path::aten) {
    return ragged_plan_aten(experts, num_experts, first_expert, num_local_experts, max_rows, known_rows);
  }
  const Tensor ids = experts.contiguous();
  const Tensor rows = empty({ids.numel()}, ids.options());
  const Tensor group_sizes = empty({num_local_experts}, ids.options());
  const Tensor dropped = empty({}, ids.options());
  RaggedPlan<int64_t> plan{const_pointer<int64_t>(ids),
                           ids.numel(),
                           first_expert,
                           num_local_experts,
                           max_rows.value_or(-1),
                           pointer<int64_t>(group_sizes),
                           pointer<int64_t>(dropped),
                           nullptr,
                           pointer<int64_t>(rows)};
  maxmoe::ragged_plan(plan, torch_executor());  // without slots: counts the rows of each expert
  int64_t num_rows = 0;
  for (int64_t expert = 0; expert < num_local_experts; ++expert) num_rows += plan.group_sizes[expert];
  MAXMOE_CHECK(known_rows.value_or(num_rows) == num_rows, kRaggedPlan, "num_rows must be the number of rows (",
               num_rows, "), got ", known_rows.value_or(0));
  const Tensor slots = empty({num_rows}, ids.options());
  plan.slots = pointer<int64_t>(slots);
  if (plan.slots == nullptr) {  // no rows
    rows.fill_(-1);
  } else {
    maxmoe::ragged_plan(plan, torch_executor());
  }
  return {slots, rows, group_sizes, dropped};
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<ragged_plan, ragged_plan_backend>(
      library,
      "ragged_plan(Tensor experts, int num_experts, *, int first_expert=0, int? num_local_experts=None, "
      "SymInt? max_rows=None, SymInt? num_rows=None) -> (Tensor slots, Tensor rows, Tensor group_sizes, Tensor "
      "dropped)");
}

}  // namespace
}  // namespace maxmoe::ops
