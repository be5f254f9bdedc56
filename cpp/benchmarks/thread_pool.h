// An executor that keeps its threads from one run to the next.
#pragma once

#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "kernels/executor.h"

namespace maxmoe::benchmarks {

// The calling thread is one of the threads. Runs must not overlap or be nested.
class ThreadPool final : public Executor {
 public:
  explicit ThreadPool(int num_threads) {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { serve(); });
  }
  ~ThreadPool() override {
    task_ = nullptr;
    start();
    for (std::thread& worker : workers_) worker.join();
  }

  int64_t num_threads() const override { return static_cast<int64_t>(workers_.size()) + 1; }

  void run(int64_t count, const Task& task) const override {
    task_ = &task;
    count_ = count;
    next_ = 0;
    first_error_ = nullptr;
    busy_ = workers_.size();
    start();
    work();
    while (busy_ != 0) std::this_thread::yield();
    if (first_error_) std::rethrow_exception(first_error_);
  }

 private:
  // Number of times that a worker polls for the next run before it sleeps, about 1 ms. Waking it takes longer than a
  // small kernel.
  static constexpr int kPollsBeforeSleep = 1000;

  void start() const {
    ++num_runs_;
    num_runs_.notify_all();
  }

  void serve() const {
    for (uint64_t seen = 0;; ++seen) {
      for (int i = 0; i < kPollsBeforeSleep && num_runs_ == seen; ++i) std::this_thread::yield();
      num_runs_.wait(seen);
      if (task_ == nullptr) return;
      work();
      --busy_;
    }
  }

  void work() const {
    try {
      for (int64_t index = next_++; index < count_; index = next_++) (*task_)(index);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!first_error_) first_error_ = std::current_exception();
    }
  }

  mutable const Task* task_ = nullptr;
  mutable int64_t count_ = 0;
  mutable std::exception_ptr first_error_;
  mutable std::mutex mutex_;
  mutable std::atomic<uint64_t> num_runs_ = 0;
  mutable std::atomic<int64_t> next_ = 0;
  mutable std::atomic<size_t> busy_ = 0;
  std::vector<std::thread> workers_;  // last, so that the members they use are destroyed after them
};

}  // namespace maxmoe::benchmarks
