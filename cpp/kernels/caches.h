// The sizes of the processor's caches, read when they are first needed.
#pragma once

#include <cstdint>

namespace maxmoe {

// Bytes of a core's second-level cache; 1 MiB where the system does not tell.
int64_t second_level_cache_bytes();

// How many micro-panels of B, of `panel_bytes` each, a block has: it takes an eighth of a second-level cache of
// `cache_bytes`, as the next block does, which is prefetched, and the rest is for A and C.
int64_t panels_per_block(int64_t panel_bytes, int64_t cache_bytes);

}  // namespace maxmoe
