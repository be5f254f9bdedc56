// How the work of the experts is divided into tasks.
//
// There are two kinds of products. Forward, and for the gradients of activations, a task is a tile: rows of one expert,
// for which all products are computed while the tile is in a cache. The gradient of a weight is a sum over all rows of
// an expert, so that its tasks divide the result instead.
#pragma once

#include "kernels/executor.h"
#include "kernels/experts/group_tiles.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Calls body(rows, begin, end) for the rows of every expert and for ranges [begin, end) of the hidden size. The sum
// over the rows of an expert is not split, so that its order does not depend on the number of threads. Writing the
// result counts as one row, of `row_multiply_adds`.
template <class Arguments, class Body>
void run_experts(const Arguments& a, int64_t hidden_size, int64_t row_multiply_adds, const Executor& executor,
                 const Body& body) {
  const GroupTiles list = make_whole_groups(a.routed.group_sizes, a.routed.num_groups, kWorkListScratch);
  const int64_t size = rows_per_gradient_task(list, hidden_size, threads_for_tiling(*a.gemm, executor));
  // At least one block: the biases have gradients even if the hidden size is 0.
  const int64_t blocks = hidden_size == 0 ? 1 : (hidden_size + size - 1) / size;
  const auto compute = [&](int64_t index) {
    const int64_t begin = index % blocks * size;
    body(list.tiles[index / blocks], begin, at_most(begin + size, hidden_size));
  };
  run_tasks(executor, list.count * blocks, (list.num_rows + list.count) * row_multiply_adds, Task(compute));
}

// Calls body(tile, next_group) for tiles of all rows. `depth` is the largest inner dimension of the products of a tile.
// `next_group` is the group of the tile that this thread will probably take next: tiles are taken in order, so that it
// is `num_threads` further on.
template <class Arguments, class Body>
void run_tiles(const Arguments& a, int64_t num_rows, int64_t depth, int64_t row_multiply_adds, const Executor& executor,
               const Body& body) {
  const int64_t max_rows = tile_rows(num_rows, depth, threads_for_tiling(*a.gemm, executor));
  const GroupTiles list = make_group_tiles(a.routed.group_sizes, a.routed.num_groups, max_rows, kWorkListScratch);
  const int64_t num_threads = executor.num_threads();
  const auto compute = [&](int64_t index) {
    body(list.tiles[index], list.tiles[at_most(index + num_threads, list.count - 1)].group);
  };
  run_tasks(executor, list.count, list.num_rows * row_multiply_adds, Task(compute));
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
