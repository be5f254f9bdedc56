// How kernels use threads, and the scratch memory of each thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "isa.h"

namespace maxmoe {

// A reference to a callable void(int64_t) that outlives it.
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

  // Calls task(i) once for every i in [0, count) and returns when all are done. Tasks start in order of i, each
  // on whichever thread is free. Inside a task every library runs on that thread alone, so that a result cannot
  // depend on the number of threads. The first exception of a task is thrown here.
  virtual void run(int64_t count, const Task& task) const = 0;
};

// Runs every task on the calling thread.
class SerialExecutor final : public Executor {
 public:
  void run(int64_t count, const Task& task) const override;
};

// Runs tasks of `multiply_adds` in all: on the calling thread when waking others would take longer than the work.
MAXMOE_INLINE void run_tasks(const Executor& executor, int64_t count, int64_t multiply_adds, const Task& task) {
  constexpr int64_t kWorthSharing = 1 << 17;  // some microseconds
  if (multiply_adds < kWorthSharing) return SerialExecutor().run(count, task);
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

// Rows of `columns` elements that make one task: enough bytes to outweigh starting it.
MAXMOE_INLINE int64_t rows_per_task(int64_t columns) {
  constexpr int64_t elements_per_task = 16384;
  return elements_per_task / (columns < 1 ? 1 : columns) + 1;
}

// Uninitialised memory of the calling thread, 64-byte aligned, kept for the next call. One `slot` per buffer that
// is in use at the same time; asking again for a slot gives up what it held.
// Kernels use the slots from 0 on in their tasks, kWorkListScratch around them; a Gemm uses the last three.
constexpr int kScratchSlots = 9;
constexpr int kWorkListScratch = 5;
constexpr int kGemmScratch = 6;
void* scratch_bytes(int slot, size_t bytes);

template <class T>
MAXMOE_INLINE T* scratch(int slot, int64_t count) {
  return static_cast<T*>(scratch_bytes(slot, static_cast<size_t>(count) * sizeof(T)));
}

}  // namespace maxmoe
