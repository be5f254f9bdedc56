// The work list of grouped products.
#include <gtest/gtest.h>

#include <vector>

#include "kernels/group_tiles.h"

namespace maxmoe {
namespace {

TEST(GroupTiles, CoverTheRowsOfEveryGroupInOrder) {
  const std::vector<std::vector<int64_t>> cases = {{},           {0},         {1},
                                                   {0, 0, 5, 0}, {kTileRows}, {kTileRows + 1, 0, 3 * kTileRows - 1, 1}};
  for (const std::vector<int64_t>& group_sizes : cases) {
    const auto num_groups = static_cast<int64_t>(group_sizes.size());
    const GroupTiles list = make_group_tiles(group_sizes.data(), num_groups, 0);
    std::vector<int64_t> covered(group_sizes.size(), 0);
    int64_t row = 0;
    for (int64_t i = 0; i < list.count; ++i) {
      const GroupTile& tile = list.tiles[i];
      EXPECT_EQ(tile.begin, row);
      EXPECT_GT(tile.end, tile.begin);
      EXPECT_LE(tile.end - tile.begin, kTileRows);
      covered[static_cast<size_t>(tile.group)] += tile.end - tile.begin;
      row = tile.end;
    }
    EXPECT_EQ(covered, group_sizes);
    EXPECT_EQ(list.num_rows, row);
  }
}

}  // namespace
}  // namespace maxmoe
