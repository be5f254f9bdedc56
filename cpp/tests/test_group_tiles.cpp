// Tests of the work lists of grouped products.
#include "kernels/experts/group_tiles.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

namespace maxmoe {
namespace {

constexpr int64_t kTileRows = 24;
const std::vector<std::vector<int64_t>> kCases = {{},           {0},         {1},
                                                  {0, 0, 5, 0}, {kTileRows}, {kTileRows + 1, 0, 3 * kTileRows - 1, 1}};

std::vector<GroupTile> sorted_by_row(const GroupTiles& list) {
  std::vector<GroupTile> tiles(list.tiles, list.tiles + list.count);
  std::sort(tiles.begin(), tiles.end(), [](const GroupTile& a, const GroupTile& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.group < b.group;
  });
  return tiles;
}

void expect_largest_first(const GroupTiles& list) {
  for (int64_t i = 1; i < list.count; ++i) {
    EXPECT_GE(list.tiles[i - 1].end - list.tiles[i - 1].begin, list.tiles[i].end - list.tiles[i].begin);
  }
}

TEST(GroupTiles, CoverTheRowsOfEveryGroup) {
  for (const std::vector<int64_t>& group_sizes : kCases) {
    const auto num_groups = static_cast<int64_t>(group_sizes.size());
    const GroupTiles list = make_group_tiles(group_sizes.data(), num_groups, kTileRows);
    expect_largest_first(list);
    std::vector<int64_t> covered(group_sizes.size(), 0);
    int64_t row = 0;
    int64_t group = 0;
    for (const GroupTile& tile : sorted_by_row(list)) {
      EXPECT_EQ(tile.begin, row);
      EXPECT_GE(tile.group, group);
      EXPECT_GT(tile.end, tile.begin);
      EXPECT_LE(tile.end - tile.begin, kTileRows);
      covered[static_cast<size_t>(tile.group)] += tile.end - tile.begin;
      row = tile.end;
      group = tile.group;
    }
    EXPECT_EQ(covered, group_sizes);
    EXPECT_EQ(list.num_rows, row);
  }
}

// On one thread a tile has all rows of its group, as long as they fit into scratch memory, so that each matrix is
// packed once. Several threads share large groups.
TEST(GroupTiles, TilesAreAsLargeAsBalanceAllows) {
  EXPECT_EQ(tile_rows(2000, 2048, 1), 2000);
  EXPECT_EQ(tile_rows(100000, 2048, 1), 2048);
  EXPECT_EQ(tile_rows(100000, 1 << 20, 1), 264);
  EXPECT_EQ(tile_rows(8192, 512, 2), 1024);
  EXPECT_EQ(tile_rows(300, 512, 2), 264);
}

TEST(GroupTiles, GradientTasksCoverAllRows) {
  const std::vector<int64_t> group_sizes = {100, 40};
  for (const int threads : {1, 4}) {
    const GroupTiles list = make_whole_groups(group_sizes.data(), 2);
    const int64_t rows = rows_per_gradient_task(list, 4000, threads);
    EXPECT_GE(rows * (threads == 1 ? 1 : 12), 4000);  // 100 of 140 rows are 12 of 16 tasks
    EXPECT_EQ(rows % 192, 0);
    EXPECT_GT(rows_per_gradient_task(list, 0, threads), 0);
  }
}

TEST(GroupTiles, WholeGroupsKeepTheEmptyOnes) {
  for (const std::vector<int64_t>& group_sizes : kCases) {
    const auto num_groups = static_cast<int64_t>(group_sizes.size());
    const GroupTiles list = make_whole_groups(group_sizes.data(), num_groups);
    EXPECT_EQ(list.count, num_groups);
    expect_largest_first(list);
    int64_t row = 0;
    int64_t group = 0;
    for (const GroupTile& tile : sorted_by_row(list)) {
      EXPECT_EQ(tile.group, group);
      EXPECT_EQ(tile.begin, row);
      EXPECT_EQ(tile.end - tile.begin, group_sizes[static_cast<size_t>(group++)]);
      row = tile.end;
    }
    EXPECT_EQ(list.num_rows, row);
  }
}

}  // namespace
}  // namespace maxmoe
