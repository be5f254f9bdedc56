// The Python module maxmoe._C. It calls the operators by their typed handles, so that dispatch modes, autograd,
// autocast and fake kernels see them as they see torch.ops.maxmoe.*, without the parsing of arguments by schema.
#include "library.h"
#include "python/define.h"

PYBIND11_MODULE(_C, module) {
  module.doc() =
      "The C++ core of maxmoe.\n\n"
      "Its operators are those of `torch.ops.maxmoe`, called in less time: `maxmoe.ops` has their documentation, and\n"
      "calls `torch.ops` instead while a compiler traces. A wrong type raises a TypeError, a wrong value a ValueError.";
  try {
    maxmoe::build_info();
  } catch (const std::invalid_argument& unsupported) {
    throw py::import_error(unsupported.what());
  }
  maxmoe::python::define_library(module);
  maxmoe::python::define_products(module);
  maxmoe::python::define_rows(module);
  maxmoe::python::define_routing(module);
  maxmoe::python::define_experts(module);
  maxmoe::python::define_routed_experts(module);
}
