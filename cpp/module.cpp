// The Python module maxmoe._C. Importing it registers the operators of cpp/ops. Its functions report the build and the
// memory in use, release cached memory, and force other implementations in place of the kernels.
#include <pybind11/pybind11.h>

#include <Eigen/Core>
#include <stdexcept>
#include <string>

#include "kernels/isa/caches.h"
#include "kernels/isa/isa.h"
#include "ops/backend.h"
#include "ops/cuda_kernels.h"
#include "ops/memory.h"

namespace py = pybind11;

namespace {

std::string compiler() {
#if defined(__clang__)
  return "clang " __clang_version__;
#else
  return "gcc " __VERSION__;
#endif
}

py::dict build_info() {
  py::list supported;
  for (const maxmoe::Isa isa : maxmoe::all_isas) {
    if (maxmoe::is_supported(isa)) {
      supported.append(maxmoe::name(isa));
    }
  }
  py::dict info;
  info["version"] = MAXMOE_VERSION;
  info["torch"] = MAXMOE_TORCH_VERSION;
  info["compiler"] = compiler();
  info["eigen"] = std::to_string(EIGEN_WORLD_VERSION) + "." + std::to_string(EIGEN_MAJOR_VERSION) + "." +
                  std::to_string(EIGEN_MINOR_VERSION);
  info["openmp"] = _OPENMP;
  info["isa"] = maxmoe::name(maxmoe::active_isa());
  info["supported_isas"] = supported;
  info["cuda_kernels"] = maxmoe::ops::state_of_cuda_kernels();
  info["second_level_cache_bytes"] = maxmoe::second_level_cache_bytes();
  return info;
}

}  // namespace

PYBIND11_MODULE(_C, module) {
  // Checked here, so that an invalid MAXMOE_ISA raises an ImportError instead of an error in the first operator.
  try {
    maxmoe::active_isa();
  } catch (const std::invalid_argument& error) {
    throw py::import_error(error.what());
  }
  module.def("build_info", &build_info);
  module.def("force_path", &maxmoe::ops::force_path);
  module.def("empty_cache", &maxmoe::ops::empty_cache);
  module.def("memory_allocated", &maxmoe::ops::bytes_allocated);
  module.def("memory_reserved", &maxmoe::ops::bytes_reserved);
}
