// Groups of rows cut into tiles of equal height, whatever the number of threads: the work list of the products.
#pragma once

#include "executor.h"

namespace maxmoe {

// High enough that a product runs at full speed, low enough that a tile's rows stay in the second-level cache.
constexpr int64_t kTileRows = 128;

struct GroupTile {
  int64_t group;
  int64_t begin;  // rows [begin, end)
  int64_t end;
};

struct GroupTiles {
  const GroupTile* tiles;
  int64_t count;
  int64_t num_rows;  // sum of all groups
};

// In the calling thread's scratch memory of the given slot.
GroupTiles make_group_tiles(const int64_t* group_sizes, int64_t num_groups, int scratch_slot);

}  // namespace maxmoe
