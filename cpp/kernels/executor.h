// How kernels run tasks on threads, and the scratch memory of each thread. The kernels create no threads: the caller's
// executor runs their tasks, so that torch's thread pool is the only one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "kernels/isa/isa.h"

namespace maxmoe {

// Non-owning reference to a callable void(int64_t), which must outlive it. Not std::function, which may allocate
// memory.
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

// Runs tasks on threads. cpp/ops implements it with torch's thread pool.
class Executor {
 public:
  Executor() = default;
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;
  virtual ~Executor() = default;

  // Number of threads that run tasks at the same time.
  virtual int64_t num_threads() const = 0;

  // Calls task(i) once for every i in [0, count) and returns when all calls have returned. Tasks start in order of i,
  // each on the next free thread: this balances the load of a list that is sorted by size. Inside a task every library
  // runs on the calling thread alone, so that a result cannot depend on the number of threads. The first exception of a
  // task is rethrown here.
  virtual void run(int64_t count, const Task& task) const = 0;
};

// Runs every task on the calling thread.
class SerialExecutor final : public Executor {
 public:
  int64_t num_threads() const override;
  void run(int64_t count, const Task& task) const override;
};

// Runs tasks that take `multiply_adds` multiply-adds in total. If these are few, all tasks run on the calling thread,
// because waking another thread would take longer.
MAXMOE_INLINE void run_tasks(const Executor& executor, int64_t count, int64_t multiply_adds, const Task& task) {
  constexpr int64_t kMinParallelMultiplyAdds = 1 << 17;  // some microseconds, as waking a thread takes
  if (multiply_adds < kMinParallelMultiplyAdds) return SerialExecutor().run(count, task);
  executor.run(count, task);
}

// Calls body(begin, end) over disjoint ranges of at most `grain` elements that cover [0, count). The ranges do not
// depend on the number of threads, so that a result cannot depend on it either.
template <class Body>
MAXMOE_INLINE void run_ranges(const Executor& executor, int64_t count, int64_t grain, const Body& body) {
  if (count <= 0) return;
  if (count <= grain) return body(int64_t{0}, count);
  const auto chunk = [&](int64_t index) {
    body(index * grain, count < (index + 1) * grain ? count : (index + 1) * grain);
  };
  executor.run((count + grain - 1) / grain, Task(chunk));
}

// Number of rows of `columns` elements per task. A task moves 32 to 128 KiB, depending on the type, which takes
// microseconds; starting it takes a fraction of one. Tasks four times as large gave no gain (docs/concepts/kernels.md).
MAXMOE_INLINE int64_t rows_per_task(int64_t columns) {
  constexpr int64_t kElementsPerTask = 16384;
  return kElementsPerTask / (columns < 1 ? 1 : columns) + 1;
}

// The slots of scratch memory. Buffers that are in use at the same time have different slots. Slots 0 to 4 are for a
// kernel's own tasks, and each kernel names the ones that it uses. Its work list lives around the tasks and has slot 5.
// The tasks call a Gemm, which has the last five.
constexpr int kWorkListScratch = 5;
constexpr int kPackedAScratch = 6;
constexpr int kPackedBScratch = 7;
constexpr int kSumsScratch = 8;           // partial sums of C in the accumulator's type
constexpr int kPackedReducedScratch = 9;  // packed reduced rows of the low-rank term
constexpr int kDecodedScratch = 10;       // a block of a quantized B
constexpr int kScratchSlots = 11;

// Uninitialized memory of the calling thread, 64-byte aligned. The memory is kept for later calls, which avoids the
// page faults of newly mapped memory. A later call with the same slot invalidates the pointer.
void* scratch_bytes(int slot, size_t bytes);

template <class T>
MAXMOE_INLINE T* scratch(int slot, int64_t count) {
  return static_cast<T*>(scratch_bytes(slot, static_cast<size_t>(count) * sizeof(T)));
}

}  // namespace maxmoe
