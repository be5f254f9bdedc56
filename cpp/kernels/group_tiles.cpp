#include "group_tiles.h"

#include <algorithm>

namespace maxmoe {
namespace {

// What a task packs and keeps, in elements: a few MiB.
constexpr int64_t kPackedElements = int64_t{1} << 22;

void sort_largest_first(GroupTile* tiles, int64_t count) {
  const auto is_before = [](const GroupTile& a, const GroupTile& b) {
    const int64_t difference = (a.end - a.begin) - (b.end - b.begin);
    return difference != 0 ? difference > 0 : a.begin < b.begin;
  };
  std::sort(tiles, tiles + count, is_before);
}

}  // namespace

GroupTiles make_group_tiles(const int64_t* group_sizes, int64_t num_groups, int64_t max_rows, int scratch_slot) {
  const auto num_tiles_of = [&](int64_t group) { return (group_sizes[group] + max_rows - 1) / max_rows; };
  int64_t num_tiles = 0;
  for (int64_t group = 0; group < num_groups; ++group) num_tiles += num_tiles_of(group);
  auto* tiles = scratch<GroupTile>(scratch_slot, num_tiles);
  int64_t row = 0;
  int64_t count = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    const int64_t of_group = num_tiles_of(group);
    const int64_t first_row = row;
    for (int64_t tile = 1; tile <= of_group; ++tile) {
      const int64_t end = first_row + group_sizes[group] * tile / of_group;
      tiles[count++] = {group, row, end};
      row = end;
    }
  }
  sort_largest_first(tiles, count);
  return {tiles, count, row};
}

int64_t balanced_tasks(const Executor& executor) {
  constexpr int64_t kTasksPerThread = 4;
  return executor.num_threads() == 1 ? 1 : kTasksPerThread * executor.num_threads();
}

int64_t tile_rows(int64_t num_rows, int64_t depth, const Executor& executor) {
  constexpr int64_t kMinRows = 264;  // below, packing takes more than a few percent of a product's time
  const int64_t most = std::max(kPackedElements / std::max<int64_t>(depth, 1), kMinRows);
  return std::clamp(num_rows / balanced_tasks(executor), kMinRows, most);
}

GroupTiles make_whole_groups(const int64_t* group_sizes, int64_t num_groups, int scratch_slot) {
  auto* tiles = scratch<GroupTile>(scratch_slot, num_groups);
  int64_t row = 0;
  for (int64_t group = 0; group < num_groups; ++group) {
    tiles[group] = {group, row, row + group_sizes[group]};
    row += group_sizes[group];
  }
  sort_largest_first(tiles, num_groups);
  return {tiles, num_groups, row};
}

int64_t rows_per_gradient_task(const GroupTiles& groups, int64_t size, const Executor& executor) {
  constexpr int64_t kGrain = 192;  // of whole micro-tiles
  if (groups.count == 0) return std::max<int64_t>(size, 1);
  const GroupTile& largest = groups.tiles[0];
  const int64_t packed = size * (largest.end - largest.begin) / kPackedElements + 1;
  const int64_t parts = std::max(packed, (balanced_tasks(executor) + groups.count - 1) / groups.count);
  return (size / parts / kGrain + 1) * kGrain;
}

}  // namespace maxmoe
