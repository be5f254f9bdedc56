// Runs kernels in the emulator, in several schedules.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cuda/emulator.h"
#include "cuda/kernels.h"
#include "matrix.h"
#include "shapes.h"

namespace maxmoe {

template <class T>
bool operator==(const Matrix<T>& a, const Matrix<T>& b) {
  return a.has_same_bits(b);
}

inline std::vector<cuda::emulator::Schedule> schedules() {
  using cuda::emulator::Order;
  return {{Order::forward, 1, true, 1000, 2},
          {Order::backward, 2, false, 1000, 5},
          {Order::random, 3, true, 1, 1},
          {Order::random, 4, false, 2, 1},
          {Order::random, 5, true, 1000, 3}};
}

// Returns what run() returns; checks that it is the same, bit for bit, in every schedule.
template <class Run>
auto in_every_schedule(const Run& run) {
  const std::vector<cuda::emulator::Schedule> all = schedules();
  cuda::emulator::schedule = all[0];
  const auto first = run();
  for (size_t i = 1; i < all.size(); ++i) {
    cuda::emulator::schedule = all[i];
    EXPECT_TRUE(run() == first) << "schedule " << i << " gives other bits";
  }
  cuda::emulator::schedule = all[0];
  return first;
}

// Returns the matrix that kernel(out) writes, in every schedule.
template <class T, class Kernel>
Matrix<T> run_emulated(int64_t rows, int64_t columns, int64_t gap, const Kernel& kernel) {
  return in_every_schedule([&] {
    Matrix<T> out(rows, columns, gap);
    kernel(out.view());
    EXPECT_TRUE(out.gap_is_intact());
    return out;
  });
}

// The message of the error that run() throws, or "".
template <class Run>
std::string error_of(const Run& run) {
  try {
    run();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

// Gaps after the rows of matrices: with the first one kernels read single numbers, with the second one vectors if the
// columns fill them.
inline const std::vector<int64_t> kGaps = {3, 8};
inline const std::vector<int64_t> kEmulatedColumns = {1, 7, 8, 33, 40, 264};

}  // namespace maxmoe
