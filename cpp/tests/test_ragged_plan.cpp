// Tests of ragged_plan against plain loops.
#include "kernels/routing/ragged_plan.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "kernels/executor.h"
#include "routing.h"

namespace maxmoe {
namespace {

struct Plan {
  std::vector<int64_t> slots;
  std::vector<int64_t> rows;
  std::vector<int64_t> group_sizes;
  int64_t dropped = -7;
};

Plan run(const std::vector<int64_t>& experts, int64_t first_expert, int64_t num_local_experts, int64_t max_rows) {
  Plan plan;
  plan.group_sizes.assign(static_cast<size_t>(num_local_experts), -7);
  plan.rows.assign(experts.size(), -7);
  RaggedPlan<int64_t> arguments{};
  arguments.experts = experts.data();
  arguments.num_slots = static_cast<int64_t>(experts.size());
  arguments.first_expert = first_expert;
  arguments.num_local_experts = num_local_experts;
  arguments.max_rows = max_rows;
  arguments.group_sizes = plan.group_sizes.data();
  arguments.dropped = &plan.dropped;
  arguments.rows = plan.rows.data();
  ragged_plan(arguments, SerialExecutor());

  int64_t num_rows = 0;
  for (const int64_t size : plan.group_sizes) num_rows += size;
  plan.slots.assign(static_cast<size_t>(num_rows), -7);
  int64_t nothing = 0;
  arguments.slots = plan.slots.empty() ? &nothing : plan.slots.data();
  ragged_plan(arguments, SerialExecutor());
  return plan;
}

// Expects the local slots ordered by expert, then by slot. Slots past the first `max_rows` are dropped.
void check(const std::vector<int64_t>& experts, int64_t first_expert, int64_t num_local_experts, int64_t max_rows) {
  Plan want;
  want.rows.assign(experts.size(), -1);
  want.group_sizes.assign(static_cast<size_t>(num_local_experts), 0);
  want.dropped = 0;
  for (int64_t local = 0; local < num_local_experts; ++local) {
    for (size_t slot = 0; slot < experts.size(); ++slot) {
      if (experts[slot] < 0 || experts[slot] != first_expert + local) continue;
      if (max_rows >= 0 && static_cast<int64_t>(want.slots.size()) == max_rows) {
        ++want.dropped;
        continue;
      }
      want.rows[slot] = static_cast<int64_t>(want.slots.size());
      want.slots.push_back(static_cast<int64_t>(slot));
      ++want.group_sizes[static_cast<size_t>(local)];
    }
  }
  const Plan got = run(experts, first_expert, num_local_experts, max_rows);
  EXPECT_EQ(got.slots, want.slots);
  EXPECT_EQ(got.rows, want.rows);
  EXPECT_EQ(got.group_sizes, want.group_sizes);
  EXPECT_EQ(got.dropped, want.dropped);
}

TEST(RaggedPlanTest, MatchesTheLoop) {
  for (const int64_t num_tokens : {0, 1, 2, 17, 40}) {
    for (const int64_t num_experts : {1, 3, 8, 31}) {
      for (const int64_t top_k : {1, 2, 6}) {
        const Routing routing =
            random_routing(num_tokens, std::min(top_k, num_experts), num_experts, static_cast<unsigned>(num_tokens));
        SCOPED_TRACE(testing::Message() << num_tokens << " tokens, " << num_experts << " experts, top " << top_k);
        for (const int64_t max_rows : {-1, 0, 1, 7, 1000}) {
          check(routing.experts, 0, num_experts, max_rows);
          check(routing.experts, num_experts / 2, num_experts - num_experts / 2, max_rows);
          check(routing.experts, num_experts / 3, 1, max_rows);
        }
      }
    }
  }
}

TEST(RaggedPlanTest, NoLocalExperts) {
  check({0, 1, 2}, 1, 0, -1);
}

TEST(RaggedPlanTest, AllToOneExpert) {
  check(std::vector<int64_t>(50, 3), 0, 4, 20);
}

TEST(RaggedPlanTest, NothingIsRouted) {
  check(std::vector<int64_t>(9, -1), 0, 4, -1);
}

}  // namespace
}  // namespace maxmoe
