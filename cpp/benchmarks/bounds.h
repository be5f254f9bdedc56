// Upper bounds for the speed of kernels: the peak of the multiply-add units, and the bandwidth of memory.
#pragma once

#include "kernels/executor.h"
#include "kernels/matrix/dtype.h"

namespace maxmoe {

// Runs `multiply_adds` multiply-adds of elements of T on the calling thread, with all operands in registers.
template <class T>
struct PeakMultiplyAdds {
  int64_t multiply_adds;
};

// Reads memory once, in order.
template <class Word>
struct SequentialRead {
  const Word* data;
  int64_t count;
};

}  // namespace maxmoe

MAXMOE_KERNEL(peak_multiply_adds, PeakMultiplyAdds)
MAXMOE_KERNEL(sequential_read, SequentialRead)
