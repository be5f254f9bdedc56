#include "library.h"

#include <pybind11/typing.h>

#include "python/define.h"

namespace maxmoe::python {
namespace {

py::typing::Dict<py::str, py::object> build_info_as_dict() {
  const BuildInfo info = build_info();
  py::typing::Dict<py::str, py::object> dict;
  dict["version"] = info.version;
  dict["torch"] = info.torch;
  dict["compiler"] = info.compiler;
  dict["eigen"] = info.eigen;
  dict["openmp"] = info.openmp;
  dict["isa"] = info.isa;
  dict["supported_isas"] = info.supported_isas;
  dict["cuda_kernels"] = info.cuda_kernels;
  dict["second_level_cache_bytes"] = info.second_level_cache_bytes;
  return dict;
}

}  // namespace

void define_library(py::module_& module) {
  module.def("build_info", &build_info_as_dict,
             "Return the versions of the core, torch, compiler and Eigen, the instruction sets and the cache.");
  define(
      module, "force_path", +[](std::string_view path) { return force_path(std::string(path)); }, py::arg("path"),
      "Set the implementation of operators for tensors on the CPU: \"kernels\", \"cuda_emulator\" or \"aten\".\n\n"
      "Returns the previous one.");
  module.def("empty_cache", &empty_cache,
             "Return cached memory of the operators to the system, as `torch.cuda.empty_cache` does for a GPU.\n\n"
             "On Linux, freed CPU memory of results and work space of at least 1 MiB is cached for later calls. The "
             "cache is never\nlarger than the peak use, and the system can reclaim it when it needs memory "
             "(`MADV_FREE`), so that it only shows in\nthe resident memory of the process. On other systems, nothing "
             "is cached.");
  module.def("memory_allocated", &memory_allocated, "Return the bytes in use by results and work space of operators.");
  module.def("memory_reserved", &memory_reserved,
             "Return the bytes in use and the bytes of freed pages that are kept.");
}

}  // namespace maxmoe::python
