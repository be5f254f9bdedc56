// How kernels run tasks on threads, and the scratch memory of each thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace maxmoe {

// A non-owning reference to a callable void(int64_t), which must outlive it. Not std::function: that may allocate.
class Task {
 public:
  template <class Callable>
  Task(const Callable& callable)  // NOLINT(google-explicit-constructor): lambdas pass as tasks
      : object_(&callable),
        call_([](const void* object, int64_t index) { (*static_cast<const Callable*>(object))(index); }) {}
  void operator()(int64_t index) const { call_(object_, index); }

 private:
  const void* object_;
  void (*call_)(const void*, int64_t);
};

class Executor {
 public:
  Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  virtual ~Executor() = default;

  // How many tasks run at the same time.
  virtual int64_t num_threads() const = 0;

  // Calls task(i) once for every i in [0, count) and returns when all are done. Tasks start in order of i, each on
  // whichever thread is free. Inside a task every library runs on that thread alone, so that a result cannot depend on
  // the number of threads. The first exception of a task is rethrown here.
  virtual void run(int64_t count, const Task& task) const = 0;
};

// Runs every task on the calling thread.
class SerialExecutor final : public Executor {
 public:
  int64_t num_threads() const override;
  void run(int64_t count, const Task& task) const override;
};

// Runs tasks that take `multiply_adds` multiply-adds in all. Few of them run on the calling thread: waking others would
// take longer.
MAXMOE_INLINE void run_tasks(const Executor& executor, int64_t count, int64_t multiply_adds, const Task& task) {
  constexpr int64_t kMinParallelMultiplyAdds = 1 << 17;  // some microseconds, as waking a thread takes
  if (multiply_adds < kMinParallelMultiplyAdds) return SerialExecutor().run(count, task);
  executor.run(count, task);
}

// Calls body(begin, end) over disjoint ranges that cover [0, count), each of at most `grain` elements.
template <class Body>
MAXMOE_INLINE void run_ranges(const Executor& executor, int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  if (count <= grain) return body(int64_t{0}, count);
  const auto chunk = [&](int64_t index) {
    body(index * grain, count < (index + 1) * grain ? count : (index + 1) * grain);
  };
  executor.run((count + grain - 1) / grain, Task(chunk));
}

// How many rows of `columns` elements make one task: 32 to 128 KiB by type, which take microseconds to move, while
// taking a task takes a fraction of one. Four times as many were no faster.
MAXMOE_INLINE int64_t rows_per_task(int64_t columns) {
  constexpr int64_t kElementsPerTask = 16384;
  return kElementsPerTask / (columns < 1 ? 1 : columns) + 1;
}

// The slots of scratch memory: a buffer for each that is in use at the same time. A kernel has slots 0 to 4 to itself
// inside its tasks; around them it holds its work list, and inside them it calls a Gemm, which has the last three.
constexpr int kWorkListScratch = 5;
constexpr int kPackedAScratch = 6;
constexpr int kPackedBScratch = 7;
constexpr int kSumsScratch = 8;  // of C in the accumulator's type
constexpr int kScratchSlots = 9;

// Uninitialised memory of the calling thread, 64-byte aligned. It is kept for the next call, which spares the page
// faults of fresh memory; a second call for a slot invalidates what the first one returned.
void* scratch_bytes(int slot, size_t bytes);

template <class T>
MAXMOE_INLINE T* scratch(int slot, int64_t count) {
  return static_cast<T*>(scratch_bytes(slot, static_cast<size_t>(count) * sizeof(T)));
}

}  // namespace maxmoe
