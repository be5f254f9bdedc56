# The operators and the Python module maxmoe._C.
execute_process(
  COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
  OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE MAXMOE_PYBIND11_FAILED)
if(MAXMOE_PYBIND11_FAILED)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no pybind11: pip install 'pybind11>=3.0,<3.1'")
endif()
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 3.0 CONFIG REQUIRED)

# Objects, not an archive: from an archive the linker would drop the files that only register operators.
file(GLOB MAXMOE_OP_SOURCES CONFIGURE_DEPENDS cpp/ops/*.cpp)
add_library(maxmoe_ops OBJECT ${MAXMOE_OP_SOURCES})
target_link_libraries(maxmoe_ops PUBLIC maxmoe_kernels maxmoe_torch)
# GCC 12 warns that the destructor of an empty std::optional<at::Tensor> reads uninitialised memory.
target_compile_options(maxmoe_ops PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)

# Torch's headers take most of the time of every file. A compiler cache cannot keep what is precompiled.
if(NOT CMAKE_CXX_COMPILER_LAUNCHER)
  target_precompile_headers(maxmoe_ops PRIVATE cpp/ops/operator.h)
endif()

# NO_EXTRAS: no link-time optimisation, which makes the build half as long again.
pybind11_add_module(_C MODULE NO_EXTRAS cpp/module.cpp)
target_compile_definitions(_C PRIVATE
  MAXMOE_VERSION="${MAXMOE_VERSION}" MAXMOE_TORCH_VERSION="${MAXMOE_TORCH_VERSION}")
target_link_libraries(_C PRIVATE maxmoe_ops)
target_link_options(_C PRIVATE -Wl,--as-needed -Wl,--exclude-libs,ALL)
set_target_properties(_C PROPERTIES INSTALL_RPATH "$ORIGIN/../torch/lib")

# maxmoe/_library.py compares this file with the torch that runs, before it loads the module.
file(WRITE ${CMAKE_CURRENT_BINARY_DIR}/_torch_version.txt "${MAXMOE_TORCH_VERSION}\n")
install(TARGETS _C LIBRARY DESTINATION . COMPONENT maxmoe_python)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/_torch_version.txt DESTINATION . COMPONENT maxmoe_python)
