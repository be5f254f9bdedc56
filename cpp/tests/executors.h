// An executor that runs tasks on several threads.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/executor.h"

namespace maxmoe {

// Starts new threads for every run. This is slow, but the scratch memory of a thread is new: no task finds values of an
// earlier run in it.
class ThreadExecutor final : public Executor {
 public:
  explicit ThreadExecutor(int num_threads) : num_threads_(num_threads) {}

  int64_t num_threads() const override { return num_threads_; }

  void run(int64_t count, const Task& task) const override {
    std::atomic<int64_t> next = 0;
    std::exception_ptr first_error;
    std::mutex mutex;
    const auto work = [&] {
      try {
        for (int64_t index = next++; index < count; index = next++) task(index);
      } catch (...) {
        const std::lock_guard<std::mutex> lock(mutex);
        if (!first_error) first_error = std::current_exception();
      }
    };
    std::vector<std::thread> threads;
    for (int i = 0; i < num_threads_; ++i) threads.emplace_back(work);
    for (std::thread& thread : threads) thread.join();
    if (first_error) std::rethrow_exception(first_error);
  }

 private:
  int num_threads_;
};

}  // namespace maxmoe
