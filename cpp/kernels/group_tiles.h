// Groups of rows cut into tiles of equal height, whatever the number of threads: the work list of the products.
#pragma once

#include "executor.h"

namespace maxmoe {

// High enough that a product runs at full speed, low enough that a tile's rows stay in the second-level cache.
// A multiple of the heights of the micro-tiles (6 and 12).
constexpr int64_t kTileRows = 264;

struct GroupTile {
  int64_t group;
  int64_t begin;  // rows [begin, end)
  int64_t end;
};

// In the calling thread's scratch memory of the slot that was given. Largest first, so that threads end together.
struct GroupTiles {
  const GroupTile* tiles;
  int64_t count;
  int64_t num_rows;  // sum of all groups
};

GroupTiles make_group_tiles(const int64_t* group_sizes, int64_t num_groups, int scratch_slot);

// Every group as one tile, empty ones too.
GroupTiles make_whole_groups(const int64_t* group_sizes, int64_t num_groups, int scratch_slot);

}  // namespace maxmoe
