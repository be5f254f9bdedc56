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

// For how many threads work is cut: where bits depend on the tiles, they must not depend on the threads.
template <class T>
MAXMOE_INLINE int64_t threads_to_cut_for(const Gemm<T>& gemm, const Executor& executor) {
  constexpr int64_t kAnyNumber = 16;
  return gemm.bits_depend_on_tiles() ? kAnyNumber : executor.num_threads();
}

// How many tasks of different sizes keep all threads busy to about the same moment.
int64_t balanced_tasks(int64_t num_threads);

// The rows of a tile, of `num_rows` in all, for products with an inner dimension of at most `depth`. A tile packs the
// matrix of its group, which costs less of its time the more rows it has; but there must be enough tiles for all
// threads, and its rows are scratch memory.
int64_t tile_rows(int64_t num_rows, int64_t depth, int64_t num_threads);

// Into how many tasks the work of the largest tile of a list has to be cut, so that threads are done at about the same
// time; smaller ones are cut likewise.
int64_t parts_of_largest(const GroupTiles& list, int64_t num_threads);

// Every group as one tile, empty ones too.
GroupTiles make_whole_groups(const int64_t* group_sizes, int64_t num_groups, int scratch_slot);

// How many of the `size` rows of a result, a sum over the rows of a whole group, make a task.
int64_t rows_per_gradient_task(const GroupTiles& groups, int64_t size, int64_t num_threads);

}  // namespace maxmoe
