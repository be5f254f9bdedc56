// Only for the .cpp files that are compiled per instruction set.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gemm.h"
#include "isa.h"
#include "vector.h"

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// The cache lines of a block of B, prefetched into the second-level cache one after the other: rows of large matrices
// are pages apart, where hardware prefetchers stop.
class BlockPrefetch {
 public:
  template <class T>
  MAXMOE_INLINE BlockPrefetch(const GemmOperand<T>& b, Range depth, Range columns) {
    const Range rows = b.is_transposed ? columns : depth;
    const Range elements = b.is_transposed ? depth : columns;
    if (b.index != nullptr || rows.size() <= 0 || elements.size() <= 0) return;
    row_ = reinterpret_cast<const std::byte*>(b.memory.row(rows.begin) + elements.begin);
    stride_ = b.memory.row_stride * int64_t{sizeof(T)};
    row_bytes_ = elements.size() * int64_t{sizeof(T)};
    num_lines_ = rows.size() * ((row_bytes_ + kCacheLineBytes - 1) / kCacheLineBytes);
  }

  // Lines that are left.
  MAXMOE_INLINE int64_t num_lines() const { return num_lines_; }

  // Prefetches one line.
  MAXMOE_INLINE void advance() {
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
