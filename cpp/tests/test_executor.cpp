// Tests of tasks, ranges and scratch memory.
#include <gtest/gtest.h>

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "executors.h"
#include "kernels/executor.h"

namespace maxmoe {
namespace {

TEST(Executor, SerialRunsEveryTaskInOrder) {
  std::vector<int64_t> seen;
  const auto task = [&](int64_t index) { seen.push_back(index); };
  SerialExecutor().run(4, Task(task));
  EXPECT_EQ(seen, (std::vector<int64_t>{0, 1, 2, 3}));
  SerialExecutor().run(0, Task(task));
  EXPECT_EQ(seen.size(), 4U);
}

TEST(Executor, ExceptionsOfTasksArrive) {
  const auto task = [](int64_t index) {
    if (index == 3) throw std::runtime_error("three");
  };
  EXPECT_THROW(SerialExecutor().run(5, Task(task)), std::runtime_error);
  EXPECT_THROW(ThreadExecutor(3).run(5, Task(task)), std::runtime_error);
}

TEST(Executor, RangesCoverEverythingOnce) {
  for (const int64_t count : {0, 1, 2, 9, 10, 11, 97}) {
    for (const int64_t grain : {1, 3, 10, 100}) {
      std::vector<std::atomic<int>> visits(static_cast<size_t>(count));
      run_ranges(ThreadExecutor(4), count, grain, [&](int64_t begin, int64_t end) {
        EXPECT_LE(end - begin, grain);
        for (int64_t i = begin; i < end; ++i) ++visits[static_cast<size_t>(i)];
      });
      for (const auto& visit : visits) EXPECT_EQ(visit, 1) << "count " << count << ", grain " << grain;
    }
  }
}

TEST(Executor, ATaskHasRowsWhateverTheWidth) {
  for (const int64_t columns : {0, 1, 7, 16384, 1 << 24}) EXPECT_GE(rows_per_task(columns), 1) << columns;
}

TEST(Executor, ScratchIsAlignedKeptAndPerSlotAndThread) {
  auto* first = scratch<double>(0, 100);
  auto* second = scratch<double>(1, 100);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(first) % 64, 0U);
  EXPECT_NE(first, second);
  first[99] = 1.5;
  EXPECT_EQ(scratch<double>(0, 50), first);  // a smaller request gets the same memory
  EXPECT_EQ(first[99], 1.5);
  void* elsewhere = nullptr;
  const auto task = [&](int64_t) { elsewhere = scratch_bytes(0, 8); };
  ThreadExecutor(1).run(1, Task(task));
  EXPECT_NE(elsewhere, static_cast<void*>(first));
  EXPECT_NE(scratch<double>(0, 100000), nullptr);
}

}  // namespace
}  // namespace maxmoe
