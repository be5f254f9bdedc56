#include "kernels/isa/caches.h"

#include <unistd.h>

#include <algorithm>

namespace maxmoe {

int64_t second_level_cache_bytes() {
  // Read once per process: sysconf may execute the CPUID instruction, which traps to the hypervisor in a virtual
  // machine.
  static const int64_t bytes = [] {
    // A size that most processors reach or exceed.
    constexpr int64_t kUnknown = int64_t{1} << 20;
#ifdef _SC_LEVEL2_CACHE_SIZE
    // sysconf returns 0 or -1 if the size is unknown.
    const int64_t reported = sysconf(_SC_LEVEL2_CACHE_SIZE);
    return reported > 0 ? reported : kUnknown;
#else
    return kUnknown;
#endif
  }();
  return bytes;
}

int64_t panels_per_block(int64_t panel_bytes, int64_t cache_bytes) {
  constexpr int64_t kMaxPanels = 16;  // bounds the scratch memory of packed B and of the sums of C
  // At least one panel, because a micro-kernel multiplies a whole one.
  return std::clamp<int64_t>(cache_bytes / 8 / panel_bytes, 1, kMaxPanels);
}

}  // namespace maxmoe
