// Numbers of columns and index lists that the tests of the ragged kernels share.
#pragma once

#include <cstdint>
#include <vector>

#include "random.h"

namespace maxmoe {

// Sizes around the widths of vectors, and around the kernels' blocks of 256 columns.
inline const std::vector<int64_t> kColumns = {1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 33, 40, 255, 257};

// `count` random indices in [0, size), with repetitions; one in eight is -1.
inline std::vector<int64_t> random_index(int64_t count, int64_t size, unsigned seed) {
  Random random(seed);
  std::vector<int64_t> index;
  for (int64_t i = 0; i < count; ++i) {
    const bool is_valid = size > 0 && random.below(8) != 0;
    index.push_back(is_valid ? static_cast<int64_t>(random.below(static_cast<uint64_t>(size))) : -1);
  }
  return index;
}

}  // namespace maxmoe
