// Tests of the CUDA kernel check_plan: the values of a plan.
#include "emulated.h"

namespace maxmoe {
namespace {

struct Plan {
  std::vector<int64_t> slots = {0, 5999, -1, 7};
  std::vector<int64_t> rows = std::vector<int64_t>(6000, -1);
  std::vector<int64_t> group_sizes = std::vector<int64_t>(300, 0);

  // The message of the assertion that fails, in every schedule.
  std::string error() const {
    return in_every_schedule([&] {
      return error_of([&] {
        cuda::check_plan({static_cast<int64_t>(rows.size()), static_cast<int64_t>(slots.size()), slots.data(),
                          static_cast<int64_t>(slots.size()), rows.data(), static_cast<int64_t>(rows.size()),
                          group_sizes.data(), static_cast<int64_t>(group_sizes.size())},
                         nullptr);
      });
    });
  }
};

TEST(CudaCheckPlanTest, TakesWhatFits) {
  Plan plan;
  plan.rows[5999] = 3;
  plan.group_sizes[0] = 1;
  plan.group_sizes[299] = 3;
  EXPECT_EQ(plan.error(), "");
  EXPECT_EQ((Plan{{}, {}, {}}.error()), "");
}

TEST(CudaCheckPlanErrors, NameTheList) {
  for (const int64_t wrong : {-2, 6000}) {
    Plan plan;
    plan.slots[3] = wrong;
    EXPECT_EQ(plan.error(), "maxmoe: a value of plan.slots is out of range (-1 or a slot of T * K)");
  }
  for (const int64_t wrong : {-2, 4}) {
    Plan plan;
    plan.rows[5999] = wrong;
    EXPECT_EQ(plan.error(), "maxmoe: a value of plan.rows is out of range (-1 or one of R rows)");
  }
  for (const int64_t wrong : {int64_t{-1}, int64_t{5}, std::numeric_limits<int64_t>::max()}) {
    Plan plan;
    plan.group_sizes[299] = wrong;
    EXPECT_EQ(plan.error(), "maxmoe: a value of group_sizes does not fit the rows");
  }
  Plan plan;
  plan.group_sizes[0] = 2;
  plan.group_sizes[299] = 3;
  EXPECT_EQ(plan.error(), "maxmoe: group_sizes must sum to at most the number of rows");
}

}  // namespace
}  // namespace maxmoe
