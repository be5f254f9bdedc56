#include "library.h"

#include <Eigen/Core>
#include <sstream>

#include "kernels/isa/caches.h"
#include "kernels/isa/isa.h"
#include "ops/backend.h"
#include "ops/cuda_kernels.h"
#include "ops/memory.h"

namespace maxmoe {
namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

std::string eigen() {
  std::ostringstream version;
  version << EIGEN_WORLD_VERSION << '.' << EIGEN_MAJOR_VERSION << '.' << EIGEN_MINOR_VERSION;
  return version.str();
}

std::vector<std::string> supported_isas() {
  std::vector<std::string> names;
  for (const Isa isa : all_isas) {
    if (is_supported(isa)) names.emplace_back(name(isa));
  }
  return names;
}

}  // namespace

BuildInfo build_info() {
  return {MAXMOE_VERSION,
          MAXMOE_TORCH_VERSION,
          compiler(),
          eigen(),
          _OPENMP,
          name(active_isa()),
          supported_isas(),
          ops::state_of_cuda_kernels(),
          second_level_cache_bytes()};
}

std::string force_path(const std::string& name) {
  return ops::force_path(name);
}

void empty_cache() {
  ops::empty_cache();
}

size_t memory_allocated() {
  return ops::bytes_allocated();
}

size_t memory_reserved() {
  return ops::bytes_reserved();
}

}  // namespace maxmoe
