// Groups of rows cut into tiles, the work list of grouped products. Tiles do not depend on the number of threads, so
// that results do not.
#pragma once

#include "executor.h"
#include "gemm.h"

namespace maxmoe {

// Rows of a tile: the last tile of a group has fewer.
constexpr int64_t kTileRows = kMC;

struct GroupTile {
  int64_t group;
  int64_t begin;  // rows [begin, end)
  int64_t end;
};

// In the calling thread's scratch memory of the slot that was given. Largest first: the tiles that are left for the end
// are small, and threads finish at about the same time.
struct GroupTiles {
  const GroupTile* tiles;
  int64_t count;
  int64_t num_rows;  // sum of all groups
};

GroupTiles make_group_tiles(const int64_t* group_sizes, int64_t num_groups, int scratch_slot);

// Every group as one tile, empty ones too.
GroupTiles make_whole_groups(const int64_t* group_sizes, int64_t num_groups, int scratch_slot);

}  // namespace maxmoe
