#include "caches.h"

#include <unistd.h>

#include <algorithm>

namespace maxmoe {

int64_t second_level_cache_bytes() {
  static const int64_t bytes = [] {
    constexpr int64_t kUnknown = int64_t{1} << 20;
#ifdef _SC_LEVEL2_CACHE_SIZE
    const int64_t told = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return told > 0 ? told : kUnknown;
#else
    return kUnknown;
#endif
  }();
  return bytes;
}

int64_t panels_per_block(int64_t panel_bytes, int64_t cache_bytes) {
  constexpr int64_t kMost = 16;  // bounds packed B, and the sums of C beside it
  return std::clamp<int64_t>(cache_bytes / 8 / panel_bytes, 1, kMost);
}

}  // namespace maxmoe
