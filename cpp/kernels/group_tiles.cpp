#include "group_tiles.h"

#include <algorithm>

namespace maxmoe {
namespace {

void sort_largest_first(GroupTile* tiles, int64_t count) {
  const auto is_before = [](const GroupTile& a, const GroupTile& b) {
    const int64_t difference = (a.end - a.begin) - (b.end - b.begin);
    return difference != 0 ? difference > 0 : a.begin < b.begin;
  };
  std::sort(tiles, tiles + count, is_before);
}

}  // namespace

GroupTiles make_group_tiles(const int64_t* group_sizes, int64_t num_groups, int scratch_slot) {
  int64_t num_tiles = 0;
  for (int64_t group = 0; group < num_groups; ++group) num_tiles += (group_sizes[group] + kTileRows - 1) / kTileRows;
  auto* tiles = scratch<GroupTile>(scratch_slot, num_tiles);
  int64_t row = 0;
  int64_t count = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t group_end = row + group_sizes[group];
    for (; row < group_end; row += kTileRows) tiles[count++] = {group, row, std::min(row + kTileRows, group_end)};
    row = group_end;
  }
  sort_largest_first(tiles, count);
  return {tiles, count, row};
}

GroupTiles make_whole_groups(const int64_t* group_sizes, int64_t num_groups, int scratch_slot) {
  auto* tiles = scratch<GroupTile>(scratch_slot, num_groups);
  int64_t row = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    tiles[group] = {group, row, row + group_sizes[group]};
    row += group_sizes[group];
  }
  sort_largest_first(tiles, num_groups);
  return {tiles, num_groups, row};
}

}  // namespace maxmoe
