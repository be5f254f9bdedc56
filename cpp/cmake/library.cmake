# The operators, in one library for each torch: libmaxmoe_torch2_13.so, ... The kernels are shared. Python is not linked:
# C++ programs load it as well (cpp/library.h). maxmoe._C, the module of each Python, is linked to it (python.cmake).
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

  set(library maxmoe_library_${minor})
  add_library(${library} SHARED cpp/library.cpp)
  target_compile_definitions(${library} PRIVATE
    MAXMOE_VERSION="${MAXMOE_VERSION}" MAXMOE_TORCH_VERSION="${MAXMOE_TORCH_VERSION_${minor}}")
  target_link_libraries(${library} PRIVATE ${ops} ${CMAKE_DL_LIBS} PUBLIC maxmoe_torch_${minor})
  # --no-undefined: a symbol of Python, which no linked library has, ends the build.
  target_link_options(${library} PRIVATE -Wl,--as-needed -Wl,--no-undefined -Wl,--exclude-libs,ALL)
  set_target_properties(${library} PROPERTIES OUTPUT_NAME maxmoe_torch${minor} INSTALL_RPATH "$ORIGIN/../torch/lib")
  install(TARGETS ${library} LIBRARY DESTINATION . COMPONENT maxmoe_package)
endforeach()
