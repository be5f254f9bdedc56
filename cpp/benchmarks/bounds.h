// What no kernel can beat: the multiply-add units at their peak, and memory at its bandwidth.
#pragma once

#include "kernels/dtype.h"
#include "kernels/executor.h"

namespace maxmoe {

// That many multiply-adds of elements of T, on registers alone, on the calling thread.
template <class T>
struct PeakMultiplyAdds {
  int64_t multiply_adds;
};

// Reads memory once, in order.
template <class Word>
struct StreamingRead {
  const Word* data;
  int64_t count;
};

}  // namespace maxmoe

MAXMOE_KERNEL(peak_multiply_adds, PeakMultiplyAdds)
MAXMOE_KERNEL(streaming_read, StreamingRead)
