// What the library libmaxmoe_torch*.so has beside its operators: the build, the memory in use, and the choice of other
// implementations in place of the kernels. Loading the library registers the operators of cpp/ops, for C++ programs as
// well; it has no symbols of Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#define MAXMOE_API __attribute__((visibility("default")))

namespace maxmoe {

struct BuildInfo {
  std::string version;
  std::string torch;
  std::string compiler;
  std::string eigen;
  int openmp = 0;  // the macro _OPENMP
  std::string isa;
  std::vector<std::string> supported_isas;
  std::string cuda_kernels;
  int64_t second_level_cache_bytes = 0;
};

// Throws std::invalid_argument if the environment variable MAXMOE_ISA names an instruction set that cannot run. Then no
// operator may be called.
MAXMOE_API BuildInfo build_info();

// Sets the implementation of operators for tensors on the CPU: "kernels", "cuda_emulator" or "aten". Returns the
// previous one.
MAXMOE_API std::string force_path(const std::string& name);

// Memory of results and work space of the operators: see cpp/ops/memory.h.
MAXMOE_API void empty_cache();
MAXMOE_API size_t memory_allocated();
MAXMOE_API size_t memory_reserved();

}  // namespace maxmoe
