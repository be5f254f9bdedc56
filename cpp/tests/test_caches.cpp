#include <gtest/gtest.h>

#include "kernels/isa/caches.h"

namespace {

using maxmoe::panels_per_block;

constexpr int64_t kKiB = 1024;

TEST(Caches, ABlockTakesAnEighthOfTheSecondLevelCache) {
  EXPECT_EQ(panels_per_block(64 * kKiB, 1024 * kKiB), 2);
  EXPECT_EQ(panels_per_block(64 * kKiB, 2048 * kKiB), 4);
  EXPECT_EQ(panels_per_block(32 * kKiB, 512 * kKiB), 2);
}

TEST(Caches, ABlockHasAPanelWhateverTheCache) {
  EXPECT_EQ(panels_per_block(64 * kKiB, 256 * kKiB), 1);
  EXPECT_EQ(panels_per_block(64 * kKiB, 1024 * 1024 * kKiB), 16);
}

}  // namespace
