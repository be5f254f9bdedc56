# The operators and the Python module maxmoe._C, once for each torch: _C_torch2_13, ... The kernels are shared.
execute_process(
  COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
  OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE
  RESULT_VARIABLE MAXMOE_PYBIND11_FAILED)
if(MAXMOE_PYBIND11_FAILED)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no pybind11: pip install 'pybind11>=3.0,<3.1'")
endif()
set(PYBIND11_FINDPYTHON ON)
find_package(pybind11 3.0 CONFIG REQUIRED)

file(GLOB MAXMOE_OP_SOURCES CONFIGURE_DEPENDS cpp/ops/*.cpp cpp/ops/*/*.cpp)

# By default two translation units, because torch's headers take most of the time of each one. Smaller ones are faster
# with many cores.
set(MAXMOE_UNITY_BATCH_SIZE 15 CACHE STRING "Files of the operators in one translation unit")

foreach(minor IN LISTS MAXMOE_TORCH_MINORS)
  # Objects, not an archive: from an archive the linker would drop the files that only register operators.
  set(ops maxmoe_ops_${minor})
  add_library(${ops} OBJECT ${MAXMOE_OP_SOURCES})
  target_link_libraries(${ops} PUBLIC maxmoe_kernels maxmoe_torch_${minor})
  # GCC 12 warns that the destructor of an empty std::optional<at::Tensor> reads uninitialised memory.
  target_compile_options(${ops} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)

  # Names in the anonymous namespaces of two files must differ.
  set_target_properties(${ops} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${MAXMOE_UNITY_BATCH_SIZE})

  # NO_EXTRAS: no link-time optimisation, which makes the build half as long again.
  set(module _C_torch${minor})
  pybind11_add_module(${module} MODULE NO_EXTRAS cpp/module.cpp)
  target_compile_definitions(${module} PRIVATE
    MAXMOE_VERSION="${MAXMOE_VERSION}" MAXMOE_TORCH_VERSION="${MAXMOE_TORCH_VERSION_${minor}}")
  target_link_libraries(${module} PRIVATE ${ops} ${CMAKE_DL_LIBS})
  target_link_options(${module} PRIVATE -Wl,--as-needed -Wl,--exclude-libs,ALL)
  set_target_properties(${module} PROPERTIES INSTALL_RPATH "$ORIGIN/../torch/lib")
  install(TARGETS ${module} LIBRARY DESTINATION . COMPONENT maxmoe_python)
endforeach()
