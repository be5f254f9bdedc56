// Tests of the CUDA kernel ragged_plan against plain loops.
#include <algorithm>

#include "emulated.h"
#include "routing.h"

namespace maxmoe {
namespace {

struct Plan {
  std::vector<int64_t> slots;
  std::vector<int64_t> rows;
  std::vector<int64_t> group_sizes;
  std::vector<int64_t> dropped = {-7};
  bool operator==(const Plan&) const = default;
};

struct Limits {
  int64_t num_experts;
  int64_t first_expert;
  int64_t num_local_experts;
  int64_t max_rows;
};

Plan run(const std::vector<int64_t>& experts, const Limits& limits, int64_t num_rows) {
  const auto num_slots = static_cast<int64_t>(experts.size());
  Plan plan;
  plan.slots.assign(static_cast<size_t>(num_rows), -7);
  plan.rows.assign(experts.size(), -7);
  plan.group_sizes.assign(static_cast<size_t>(limits.num_local_experts), -7);
  std::vector<int64_t> scratch(static_cast<size_t>(cuda::ragged_plan_scratch(num_slots, limits.num_local_experts)), -9);
  std::vector<int64_t> first_rows(static_cast<size_t>(limits.num_local_experts + 1), -9);
  cuda::ragged_plan(
      cuda::RaggedPlan{experts.data(), num_slots, limits.num_experts, limits.first_expert, limits.num_local_experts,
                       limits.max_rows, num_rows, scratch.data(), first_rows.data(), plan.slots.data(),
                       plan.rows.data(), plan.group_sizes.data(), plan.dropped.data()},
      nullptr);
  return plan;
}

// The local slots ordered by expert, then by slot. Slots past the first `max_rows` are dropped.
Plan naive_plan(const std::vector<int64_t>& experts, const Limits& limits) {
  Plan plan;
  plan.rows.assign(experts.size(), -1);
  plan.group_sizes.assign(static_cast<size_t>(limits.num_local_experts), 0);
  plan.dropped = {0};
  for (int64_t local = 0; local < limits.num_local_experts; ++local) {
    for (size_t slot = 0; slot < experts.size(); ++slot) {
      if (experts[slot] < 0 || experts[slot] != limits.first_expert + local) continue;
      if (limits.max_rows >= 0 && static_cast<int64_t>(plan.slots.size()) == limits.max_rows) {
        ++plan.dropped[0];
        continue;
      }
      plan.rows[slot] = static_cast<int64_t>(plan.slots.size());
      plan.slots.push_back(static_cast<int64_t>(slot));
      ++plan.group_sizes[static_cast<size_t>(local)];
    }
  }
  return plan;
}

// Compares with the loop, with num_rows equal to the number of rows and 5 higher: the slots of the 5 rows are -1.
void check(const std::vector<int64_t>& experts, const Limits& limits) {
  Plan want = naive_plan(experts, limits);
  for (const int64_t padding : {0, 5}) {
    const auto num_rows = static_cast<int64_t>(want.slots.size()) + padding;
    want.slots.resize(static_cast<size_t>(num_rows), -1);
    const Plan got = in_every_schedule([&] { return run(experts, limits, num_rows); });
    EXPECT_EQ(got.slots, want.slots);
    EXPECT_EQ(got.rows, want.rows);
    EXPECT_EQ(got.group_sizes, want.group_sizes);
    EXPECT_EQ(got.dropped, want.dropped);
  }
}

TEST(CudaRaggedPlanTest, MatchesTheLoop) {
  for (const int64_t num_tokens : {0, 1, 17, 200}) {
    for (const int64_t num_experts : {1, 8, 40}) {
      const int64_t top_k = std::min<int64_t>(6, num_experts);
      const Routing routing = random_routing(num_tokens, top_k, num_experts, static_cast<unsigned>(num_tokens));
      SCOPED_TRACE(testing::Message() << num_tokens << " tokens, " << num_experts << " experts, top " << top_k);
      for (const int64_t max_rows : {-1, 0, 7, 1000}) {
        check(routing.experts, {num_experts, 0, num_experts, max_rows});
        check(routing.experts, {num_experts, num_experts / 2, num_experts - num_experts / 2, max_rows});
      }
    }
  }
}

// The counts of several chunks are summed by one warp, 32 at a time.
TEST(CudaRaggedPlanTest, ManyChunks) {
  const Routing routing = random_routing(5000, 2, 3, 1);
  check(routing.experts, {3, 1, 2, -1});
}

TEST(CudaRaggedPlanTest, ManyExperts) {
  const Routing routing = random_routing(40, 3, 1500, 1);
  check(routing.experts, {1500, 100, 1300, -1});
}

TEST(CudaRaggedPlanTest, OneExpertOrNone) {
  check({0, 1, 2}, {3, 1, 0, -1});
  check(std::vector<int64_t>(50, 3), {4, 0, 4, 20});
  check(std::vector<int64_t>(9, -1), {4, 0, 4, -1});
}

TEST(CudaRaggedPlanTest, ErrorsNameOperatorAndArgument) {
  for (const int64_t wrong : {-2, 4}) {
    EXPECT_EQ(error_of([&] { run({0, wrong, 1}, {4, 0, 4, -1}, 3); }),
              "maxmoe::ragged_plan: a value of experts is out of range (-1 or one of num_experts)");
  }
  EXPECT_EQ(error_of([&] { run({0, 2, 1}, {4, 0, 4, -1}, 2); }),
            "maxmoe::ragged_plan: num_rows must be at least the number of rows");
  EXPECT_EQ(error_of([&] { run({0, 2, 1}, {4, 0, 4, 2}, 2); }), "");
}

}  // namespace
}  // namespace maxmoe
