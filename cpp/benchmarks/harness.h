// Times the contenders of a benchmark in turn and prints a table.
//
// Google Benchmark is not used. Its interleaved repetitions create their inputs again each time. Its benchmarks cannot
// refer to each other, so that a column with the share of the bound, the purpose of these tables, would need a reporter
// as long as this harness. The test suite, which runs the benchmarks once, would depend on one more library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <regex>
#include <string>
#include <vector>

#include "thread_pool.h"

namespace maxmoe::benchmarks {

// A row of the table, without its contender: kernel, shape and dtype.
struct Case {
  std::string kernel;
  std::string shape;
  std::string dtype;
};

// The minimum work of one call: its multiply-adds, or the bytes that it reads and writes.
struct Work {
  double amount;
  const char* unit;
};
inline Work flops(int64_t multiply_adds) {
  return {2.0 * static_cast<double>(multiply_adds), "GFLOP/s"};
}
inline Work bytes(size_t count) {
  return {static_cast<double>(count), "GB/s"};
}

struct Contender {
  std::string name;
  std::function<void()> call;
};

class Session {
 public:
  Session(const std::string& filter, int rounds, int num_threads);

  // Whether the filter selects the case. Called before the inputs of the case are created.
  bool is_selected(const Case& c) const;

  // Times all contenders in turn and prints a row for each. The first contender is the kernel, the second its bound,
  // the others are alternatives.
  void time(const Case& c, Work work, const std::vector<Contender>& contenders);

  const ThreadPool& threads() const { return threads_; }
  int num_cases() const { return num_cases_; }

 private:
  std::regex filter_;
  int rounds_;
  ThreadPool threads_;
  int num_cases_ = 0;
};

// Registers a function with benchmarks. Each file has one global Registration, and main calls its function.
struct Registration {
  explicit Registration(void (*benchmark)(Session&));
};

}  // namespace maxmoe::benchmarks
