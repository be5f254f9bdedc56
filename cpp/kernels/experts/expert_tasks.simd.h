// How the work of the experts is divided into tasks, and the rows that a task reads.
//
// There are two kinds of products. Forward, and for the gradients of activations, a task is a tile: rows of one expert,
// for which all products are computed while the tile is in a cache. The gradient of a weight is a sum over all rows of
// an expert, so that its tasks divide the result instead.
#pragma once

#include "kernels/executor.h"
#include "kernels/experts/expert_ffn.h"
#include "kernels/experts/group_tiles.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Calls body(rows, begin, end) for the rows of every group and for ranges [begin, end) of a result of the given size.
// The sum over the rows of a group is not split, so that its order does not depend on the number of threads. Writing
// the result counts as one row, of `row_multiply_adds`.
template <class Groups, class Body>
void run_groups(const Groups& groups, int64_t result_size, int64_t row_multiply_adds, const Executor& executor,
                const Body& body) {
  const GroupTiles list = make_whole_groups(groups.group_sizes, groups.num_groups);
  const int64_t size = rows_per_gradient_task(list, result_size, executor.num_threads());
  // At least one block: the biases have gradients even if the result has no other numbers.
  const int64_t blocks = result_size == 0 ? 1 : (result_size + size - 1) / size;
  const auto compute = [&](int64_t index) {
    const int64_t begin = index % blocks * size;
    body(list.tiles[index / blocks], begin, at_most(begin + size, result_size));
  };
  run_tasks(executor, list.count * blocks, (list.num_rows + list.count) * row_multiply_adds, Task(compute));
}

// Calls body(tile, next_group) for tiles of all rows. `depth` is the largest inner dimension of the products of a tile.
// `next_group` is the group of the tile that this thread will probably take next: tiles are taken in order, so that it
// is `num_threads` further on.
template <class Arguments, class Body>
void run_tiles(const Arguments& a, int64_t num_rows, int64_t depth, int64_t row_multiply_adds, const Executor& executor,
               const Body& body) {
  const int64_t max_rows = tile_rows(num_rows, depth, executor.num_threads());
  const GroupTiles list = make_group_tiles(a.routed.group_sizes, a.routed.num_groups, max_rows);
  const int64_t num_threads = executor.num_threads();
  const auto compute = [&](int64_t index) {
    body(list.tiles[index], list.tiles[at_most(index + num_threads, list.count - 1)].group);
  };
  run_tasks(executor, list.count, list.num_rows * row_multiply_adds, Task(compute));
}

// The columns of Z or dZ of a separate gate, and the columns of up.
template <class View>
View gate_columns(const View& preactivations, int64_t gate_width) {
  return preactivations.column_range(0, gate_width);
}

template <class View>
View up_columns(const View& preactivations, int64_t gate_width) {
  return preactivations.column_range(gate_width, preactivations.columns);
}

// The tokens of rows [begin, end), as an operand that reads them by index: they are not gathered.
template <class T>
GemmOperand<T> tokens_of(ConstMatrixView<T> x, const RoutedRows& routed, int64_t begin, int64_t end) {
  return {x, routed.slots + begin, routed.top_k, end - begin};
}

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
