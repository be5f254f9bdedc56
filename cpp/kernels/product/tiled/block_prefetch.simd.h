// Software prefetch of a block of B.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kernels/isa/isa.h"
#include "kernels/isa/vector.simd.h"
#include "kernels/product/gemm.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Prefetches the cache lines of a block of B into the second-level cache, in the order of memory. Hardware prefetchers
// do not follow the rows, because the rows of a large matrix are pages apart and hardware prefetchers stop at the end
// of a page.
//
// The caller prefetches one line at a time, between multiply-adds. Bursts of prefetches after each micro-tile took 1.02
// to 1.06 of the time of a product (docs/concepts/kernels.md).
class BlockPrefetch {
 public:
  MAXMOE_INLINE BlockPrefetch() {}  // prefetches no lines
  template <class T>
  MAXMOE_INLINE BlockPrefetch(const GemmOperand<T>& b, Range depth, Range columns) {
    const Range rows = b.is_transposed ? columns : depth;
    const Range elements = b.is_transposed ? depth : columns;
    // The rows of an index have no constant stride. They are not prefetched here.
    if (b.index != nullptr || rows.size() <= 0 || elements.size() <= 0) return;
    if (b.is_quantized()) {
      row_ = reinterpret_cast<const std::byte*>(b.quantized.code(rows.begin, elements.begin));
      stride_ = b.quantized.row_bytes;
      row_bytes_ = b.quantized.bytes_of(elements.size());
    } else {
      row_ = reinterpret_cast<const std::byte*>(b.memory.row(rows.begin) + elements.begin);
      stride_ = b.memory.row_stride * int64_t{sizeof(T)};
      row_bytes_ = elements.size() * int64_t{sizeof(T)};
    }
    // A row that does not begin on a cache line ends in one more line. That line is not prefetched.
    num_lines_ = rows.size() * ((row_bytes_ + kCacheLineBytes - 1) / kCacheLineBytes);
  }

  // Number of lines that are not yet prefetched.
  MAXMOE_INLINE int64_t num_lines() const { return num_lines_; }

  // Prefetches the next line; num_lines() must not be 0.
  MAXMOE_INLINE void advance() {
    // Not into the first-level cache: it holds the micro-panels that are being multiplied.
    __builtin_prefetch(row_ + offset_, /*write*/ 0, /*locality: L2*/ 2);
    --num_lines_;
    offset_ += kCacheLineBytes;
    if (offset_ < row_bytes_) return;
    offset_ = 0;
    row_ += stride_;
  }

 private:
  const std::byte* row_ = nullptr;
  int64_t stride_ = 0;
  int64_t row_bytes_ = 0;
  int64_t num_lines_ = 0;
  int64_t offset_ = 0;
};

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
