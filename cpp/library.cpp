// The library libmaxmoe_torch*.so. Loading it registers the operators of cpp/ops. It has no symbols of Python, so that
// one file serves all versions: maxmoe/_library.py calls these C functions through ctypes. They report the build and
// the memory in use, release cached memory, and force ATen in place of the kernels.
#include <Eigen/Core>
#include <iomanip>
#include <sstream>
#include <stdexcept>
#include <string>

#include "kernels/isa/caches.h"
#include "kernels/isa/isa.h"
#include "ops/backend.h"
#include "ops/memory.h"

namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

std::string supported_isas() {
  std::ostringstream list;
  for (const maxmoe::Isa isa : maxmoe::all_isas) {
    if (maxmoe::is_supported(isa)) {
      list << (list.tellp() > 0 ? ", " : "") << std::quoted(maxmoe::name(isa));
    }
  }
  return list.str();
}

std::string build_info() {
  std::ostringstream json;
  json << "{\"version\": " << std::quoted(MAXMOE_VERSION) << ", \"torch\": " << std::quoted(MAXMOE_TORCH_VERSION)
       << ", \"compiler\": " << std::quoted(compiler()) << ", \"eigen\": \"" << EIGEN_WORLD_VERSION << '.'
       << EIGEN_MAJOR_VERSION << '.' << EIGEN_MINOR_VERSION << "\", \"openmp\": " << _OPENMP
       << ", \"isa\": " << std::quoted(maxmoe::name(maxmoe::active_isa())) << ", \"supported_isas\": ["
       << supported_isas() << "], \"second_level_cache_bytes\": " << maxmoe::second_level_cache_bytes() << '}';
  return json.str();
}

// Why the kernels cannot run, empty if they can.
std::string error() {
  try {
    maxmoe::active_isa();
    return {};
  } catch (const std::invalid_argument& invalid) {
    return invalid.what();
  }
}

}  // namespace

// maxmoe_error comes first: no other function and no operator may be called if its text is not empty.
#pragma GCC visibility push(default)
extern "C" {

const char* maxmoe_error() {
  static const std::string text = error();
  return text.c_str();
}

// A JSON object.
const char* maxmoe_build_info() {
  static const std::string text = build_info();
  return text.c_str();
}

bool maxmoe_force_aten(bool enabled) {
  return maxmoe::ops::force_aten(enabled);
}

void maxmoe_empty_cache() {
  maxmoe::ops::empty_cache();
}

size_t maxmoe_memory_allocated() {
  return maxmoe::ops::bytes_allocated();
}

size_t maxmoe_memory_reserved() {
  return maxmoe::ops::bytes_reserved();
}

}  // extern "C"
#pragma GCC visibility pop
