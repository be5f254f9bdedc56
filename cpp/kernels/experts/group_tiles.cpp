#include "kernels/experts/group_tiles.h"

#include <algorithm>

namespace maxmoe {
namespace {

// Tiles of equal size are in the order of their rows, so that the list does not depend on the implementation of
// std::sort.
void sort_largest_first(GroupTile* tiles, int64_t count) {
  const auto is_before = [](const GroupTile& a, const GroupTile& b) {
    const int64_t difference = (a.end - a.begin) - (b.end - b.begin);
    return difference != 0 ? difference > 0 : a.begin < b.begin;
  };
  std::sort(tiles, tiles + count, is_before);
}

}  // namespace

GroupTiles make_group_tiles(const int64_t* group_sizes, int64_t num_groups, int64_t max_rows) {
  const auto num_tiles_of = [&](int64_t group) { return (group_sizes[group] + max_rows - 1) / max_rows; };
  int64_t num_tiles = 0;
  for (int64_t group = 0; group < num_groups; ++group) num_tiles += num_tiles_of(group);
  auto* tiles = scratch<GroupTile>(kWorkListScratch, num_tiles);
  int64_t row = 0;
  int64_t count = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t of_group = num_tiles_of(group);
    const int64_t first_row = row;
    for (int64_t tile = 1; tile <= of_group; ++tile) {
      // Rounding each boundary, instead of the size of a tile, makes the sizes differ by at most one row.
      const int64_t end = first_row + group_sizes[group] * tile / of_group;
      tiles[count++] = {group, row, end};
      row = end;
    }
  }
  sort_largest_first(tiles, count);
  return {tiles, count, row};
}

// At the end all threads wait for the last task. With four tasks per thread it is about a quarter of a thread's work,
// and less because the list begins with the largest tasks. More tasks would pack the weights more often.
int64_t balanced_tasks(int64_t num_threads) {
  constexpr int64_t kTasksPerThread = 4;
  return num_threads == 1 ? 1 : kTasksPerThread * num_threads;
}

int64_t tile_rows(int64_t num_rows, int64_t depth, int64_t num_threads) {
  constexpr int64_t kMinRows = 264;  // with fewer rows, packing B takes more than a few percent of the time
  constexpr int64_t kTileElements = int64_t{1} << 22;
  // Bounds the scratch memory of a tile to kTileElements numbers, but not below kMinRows rows.
  const int64_t most = std::max(kTileElements / std::max<int64_t>(depth, 1), kMinRows);
  return std::clamp(num_rows / balanced_tasks(num_threads), kMinRows, most);
}

int64_t parts_of_largest(const GroupTiles& list, int64_t num_threads) {
  if (list.count == 0 || list.num_rows == 0) return 1;
  // The rows of the largest tile, divided by the rows that a task should have, rounded up.
  const int64_t largest = list.tiles[0].end - list.tiles[0].begin;
  return (largest * balanced_tasks(num_threads) + list.num_rows - 1) / list.num_rows;
}

GroupTiles make_whole_groups(const int64_t* group_sizes, int64_t num_groups) {
  auto* tiles = scratch<GroupTile>(kWorkListScratch, num_groups);
  int64_t row = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    tiles[group] = {group, row, row + group_sizes[group]};
    row += group_sizes[group];
  }
  sort_largest_first(tiles, num_groups);
  return {tiles, num_groups, row};
}

int64_t rows_per_gradient_task(const GroupTiles& groups, int64_t size, int64_t num_threads) {
  constexpr int64_t kGrain = 192;  // a multiple of MR and of NR for every type and instruction set
  return (size / parts_of_largest(groups, num_threads) / kGrain + 1) * kGrain;
}

}  // namespace maxmoe
