// Groups of rows cut into tiles, the work list of grouped products. How they are cut changes no bit of a result: see
// TileGemm.
#pragma once

#include "executor.h"
#include "gemm.h"

namespace maxmoe {

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

// Tiles of at most `max_rows` rows: those of a group are of about the same size.
GroupTiles make_group_tiles(const int64_t* group_sizes, int64_t num_groups, int64_t max_rows, int scratch_slot);

// How many tasks of different sizes keep all threads busy to about the same moment.
int64_t balanced_tasks(const Executor& executor);

// The rows of a tile, of `num_rows` in all, for products with an inner dimension of at most `depth`. A tile packs the
// matrix of its group, which costs less of its time the more rows it has; but there must be enough tiles for all
// threads, and its packed rows are scratch memory, a few MiB.
int64_t tile_rows(int64_t num_rows, int64_t depth, const Executor& executor);

// Every group as one tile, empty ones too.
GroupTiles make_whole_groups(const int64_t* group_sizes, int64_t num_groups, int scratch_slot);

// How many of the `size` rows of a result, a sum over the rows of a whole group, make a task: all of them, if there are
// enough groups for all threads and its packed rows are not too much scratch memory.
int64_t rows_per_gradient_task(const GroupTiles& groups, int64_t size, const Executor& executor);

}  // namespace maxmoe
