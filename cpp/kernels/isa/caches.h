// Sizes of the processor's caches, and the block size that follows from them.
#pragma once

#include <cstdint>

namespace maxmoe {

// Bytes of a core's second-level cache; 1 MiB if the system does not report them.
int64_t second_level_cache_bytes();

// Number of micro-panels of B, of `panel_bytes` each, in a block. A block takes an eighth of a second-level cache of
// `cache_bytes`. The next block, which is prefetched, takes another eighth, and the rest is for A and C. A quarter took
// longer in ten of twelve cases in bfloat16 (docs/concepts/kernels.md).
int64_t panels_per_block(int64_t panel_bytes, int64_t cache_bytes);

}  // namespace maxmoe
