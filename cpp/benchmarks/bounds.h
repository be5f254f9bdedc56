// Upper bounds of the speed of kernels: the peak of the multiply-add units, and the bandwidth of memory.
#pragma once

#include "kernels/dtype.h"
#include "kernels/executor.h"

namespace maxmoe {

// As many multiply-adds of elements of T, with all operands in registers, on the calling thread.
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
