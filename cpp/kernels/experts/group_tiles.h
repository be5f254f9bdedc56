// The work lists of grouped products: groups of rows, divided into tiles. With TileGemm the tiling does not change the
// bits of a result.
#pragma once

#include "kernels/executor.h"
#include "kernels/product/gemm.h"

namespace maxmoe {

struct GroupTile {
  int64_t group;
  int64_t begin;  // rows [begin, end)
  int64_t end;
};

// A work list, stored in scratch memory of the calling thread (kWorkListScratch). It is sorted by size, largest first,
// for load balance: the last tiles to start are small, so that all threads finish at about the same time.
struct GroupTiles {
  const GroupTile* tiles;
  int64_t count;
  int64_t num_rows;  // sum of the group sizes
};

// Divides every group into tiles of at most `max_rows` rows and of about equal size.
GroupTiles make_group_tiles(const int64_t* group_sizes, int64_t num_groups, int64_t max_rows);

// Number of tasks of different sizes that keeps all threads busy until about the same time.
int64_t balanced_tasks(int64_t num_threads);

// Number of rows per tile, out of `num_rows` in all, for products with an inner dimension of at most `depth`. A tile
// packs the matrix of its group, and the more rows it has, the smaller the share of packing in its time. Its size is
// limited because every thread needs several tiles for load balance, and because its rows are scratch memory.
int64_t tile_rows(int64_t num_rows, int64_t depth, int64_t num_threads);

// Number of tasks into which the largest tile of a list is divided for load balance. Smaller tiles are divided into the
// same number of tasks.
int64_t parts_of_largest(const GroupTiles& list, int64_t num_threads);

// Every group as one tile. Empty groups are kept, because their results must be written, too.
GroupTiles make_whole_groups(const int64_t* group_sizes, int64_t num_groups);

// Number of rows per task of a result with `size` rows, where the result is a sum over all rows of a group: the
// gradient of a weight.
int64_t rows_per_gradient_task(const GroupTiles& groups, int64_t size, int64_t num_threads);

// Whether the gradients of a stack are written with non-temporal stores. The products of few rows are bound by writing
// them, and micro-tiles write short pieces of many rows, whose cache lines no hardware prefetcher requests in time:
// with 16 rows per expert, non-temporal stores took 0.55 to 0.6 of the time. They still won at 3 MiB with a read of the
// gradients right after. A smaller result may be in a cache when it is read (docs/concepts/kernels.md).
template <class T>
MAXMOE_INLINE bool is_nontemporal_gradient(const MatrixStack<T>& gradients) {
  constexpr int64_t kMinBytes = int64_t{4} << 20;
  const int64_t elements = gradients.count * gradients.first.rows * gradients.first.columns;
  return elements * int64_t{sizeof(T)} >= kMinBytes;
}

}  // namespace maxmoe
