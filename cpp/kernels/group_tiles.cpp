#include "group_tiles.h"

namespace maxmoe {

GroupTiles make_group_tiles(const int64_t* group_sizes, int64_t num_groups, int scratch_slot) {
  int64_t num_tiles = 0;
  for (int64_t group = 0; group < num_groups; ++group) num_tiles += (group_sizes[group] + kTileRows - 1) / kTileRows;
  auto* tiles = scratch<GroupTile>(scratch_slot, num_tiles);
  int64_t row = 0;
  int64_t count = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t group_end = row + group_sizes[group];
    for (; row < group_end; row += kTileRows) {
      tiles[count++] = {group, row, row + kTileRows < group_end ? row + kTileRows : group_end};
    }
    row = group_end;
  }
  return {tiles, num_tiles, row};
}

}  // namespace maxmoe
