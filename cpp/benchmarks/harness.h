// The clock and the table of the benchmarks.
//
// Not Google Benchmark: there, a repetition that is interleaved with others makes its inputs anew, and no benchmark
// knows of another one, so that the share of the bound, the point of these tables, would take a reporter as long as
// this harness. And the test suite, which runs the benchmarks once, would need one more library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <regex>
#include <string>
#include <vector>

#include "thread_pool.h"

namespace maxmoe::benchmarks {

// What contenders are compared in.
struct Case {
  std::string kernel;
  std::string shape;
  std::string dtype;
};

// What one call does, or would have to do.
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

  // Whether the filter lets the case through: ask before making its inputs.
  bool wants(const Case& c) const;

  // Times everybody in turn and prints a row for each: the kernel first, then its bound, then alternatives.
  void time(const Case& c, Work work, const std::vector<Contender>& contenders);

  const ThreadPool& threads() const { return threads_; }
  int num_cases() const { return num_cases_; }

 private:
  std::regex filter_;
  int rounds_;
  ThreadPool threads_;
  int num_cases_ = 0;
};

// A file of benchmarks has one of these: main calls the function.
struct Registration {
  explicit Registration(void (*benchmark)(Session&));
};

}  // namespace maxmoe::benchmarks
