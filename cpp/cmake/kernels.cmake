# The kernels in one library. Files *.simd.cpp are compiled once per instruction set (cpp/kernels/isa/isa.h), files *.amx.cpp
# for AMX and for its emulation, the others once. No torch include path here.
file(GLOB_RECURSE MAXMOE_COMMON_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/cpp/kernels/*.cpp)
set(MAXMOE_ISA_SOURCES ${MAXMOE_COMMON_SOURCES})
list(FILTER MAXMOE_ISA_SOURCES INCLUDE REGEX "[.]simd[.]cpp$")
set(MAXMOE_AMX_SOURCES ${MAXMOE_COMMON_SOURCES})
# With the functions of other files that it calls.
list(FILTER MAXMOE_AMX_SOURCES INCLUDE REGEX "[.]amx[.]cpp$|/pack_quantized[.]simd[.]cpp$|/decode_rows[.]simd[.]cpp$")
list(FILTER MAXMOE_COMMON_SOURCES EXCLUDE REGEX "[.](simd|amx)[.]cpp$")

# The definition renames the namespace Eigen: otherwise the linker would merge its inline functions across instruction
# sets, and baseline code could run AVX-512 instructions.
function(maxmoe_add_kernels isa)
  if(isa MATCHES "^amx")
    add_library(maxmoe_kernels_${isa} OBJECT ${MAXMOE_AMX_SOURCES})
  else()
    add_library(maxmoe_kernels_${isa} OBJECT ${MAXMOE_ISA_SOURCES})
  endif()
  target_include_directories(maxmoe_kernels_${isa} PRIVATE cpp)
  target_link_libraries(maxmoe_kernels_${isa} PRIVATE maxmoe_eigen)
  target_compile_definitions(maxmoe_kernels_${isa} PRIVATE MAXMOE_ISA_NAMESPACE=${isa} Eigen=Eigen_${isa})
  # A macro that is tested before it is defined is an error (cpp/kernels/isa/target.simd.h).
  # GCC vectorizes no sqrt that may set errno, and no branch whose operations may trap. GCC 12 warns of uninitialized values
  # in its own AVX-512 intrinsics (GCC bug 105593).
  target_compile_options(maxmoe_kernels_${isa} PRIVATE
    -Werror=undef -fno-math-errno -fno-trapping-math "$<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized;-Wno-maybe-uninitialized>" ${ARGN})
  # Uses of variables after the end of their scope are looked for in the baseline alone. With the temporary vectors of
  # intrinsics, the checks made a file take 124 s to compile instead of 46.
  if(MAXMOE_SANITIZE MATCHES address AND NOT isa STREQUAL "baseline")
    target_compile_options(maxmoe_kernels_${isa} PRIVATE -fno-sanitize-address-use-after-scope)
  endif()
endfunction()

set(MAXMOE_OPTIONS_baseline)
set(MAXMOE_OPTIONS_avx2 -march=x86-64-v3)
# GCC prefers vectors of 256 bits for x86-64-v4 where it vectorizes by itself.
set(MAXMOE_OPTIONS_avx512 -march=x86-64-v4 -mprefer-vector-width=512)
set(MAXMOE_OPTIONS_avx512bf16 ${MAXMOE_OPTIONS_avx512} -mavx512bf16 -mavx512vbmi)
set(MAXMOE_OPTIONS_amx ${MAXMOE_OPTIONS_avx512bf16} -mamx-tile -mamx-bf16)
# Vectors wider than the registers of the baseline are passed in memory, which GCC notes. All their functions are inlined.
set(MAXMOE_OPTIONS_amx_emulated -DMAXMOE_EMULATES_TILES=1 $<$<CXX_COMPILER_ID:GNU>:-Wno-psabi>)
if(NOT MAXMOE_SANITIZE)
  list(APPEND MAXMOE_OPTIONS_amx_emulated -O2)
endif()

set(MAXMOE_ISAS all CACHE STRING
  "Instruction sets of the kernels: all, runnable for those that this machine can run, or native for the best of them")
set(MAXMOE_ALL_ISAS baseline)
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND MAXMOE_ALL_ISAS avx2 avx512 avx512bf16 amx)
endif()
set(MAXMOE_BUILT_ISAS ${MAXMOE_ALL_ISAS})
if(MAXMOE_ISAS MATCHES "^(runnable|native)$")
  set(ENV{MAXMOE_ISA} "")
  try_run(MAXMOE_RUN MAXMOE_COMPILED ${CMAKE_CURRENT_BINARY_DIR} ${CMAKE_CURRENT_LIST_DIR}/native_isa.cpp
    CMAKE_FLAGS -DINCLUDE_DIRECTORIES=${CMAKE_CURRENT_SOURCE_DIR}/cpp RUN_OUTPUT_VARIABLE MAXMOE_NATIVE_ISA)
  if(NOT MAXMOE_COMPILED OR NOT MAXMOE_RUN EQUAL 0)
    message(FATAL_ERROR "cannot find out the instruction set of this machine: build with -DMAXMOE_ISAS=all")
  endif()
  if(MAXMOE_ISAS STREQUAL "native")
    set(MAXMOE_BUILT_ISAS baseline ${MAXMOE_NATIVE_ISA})
    if(MAXMOE_NATIVE_ISA STREQUAL "amx") # whose other kernels are these
      list(APPEND MAXMOE_BUILT_ISAS avx512bf16)
    endif()
    list(REMOVE_DUPLICATES MAXMOE_BUILT_ISAS)
  else()  # ascending: a machine that can run one can run those before it
    list(FIND MAXMOE_ALL_ISAS ${MAXMOE_NATIVE_ISA} best)
    math(EXPR count "${best} + 1")
    list(SUBLIST MAXMOE_ALL_ISAS 0 ${count} MAXMOE_BUILT_ISAS)
  endif()
elseif(NOT MAXMOE_ISAS STREQUAL "all")
  message(FATAL_ERROR "MAXMOE_ISAS must be all, runnable or native, got ${MAXMOE_ISAS}")
endif()
message(STATUS "kernels for ${MAXMOE_BUILT_ISAS}")

set(MAXMOE_KERNEL_OBJECTS)
set(MAXMOE_MISSING_ISAS)
list(APPEND MAXMOE_ALL_ISAS amx_emulated)
list(APPEND MAXMOE_BUILT_ISAS amx_emulated)
foreach(isa IN LISTS MAXMOE_ALL_ISAS)
  if(isa IN_LIST MAXMOE_BUILT_ISAS)
    maxmoe_add_kernels(${isa} ${MAXMOE_OPTIONS_${isa}})
    list(APPEND MAXMOE_KERNEL_OBJECTS $<TARGET_OBJECTS:maxmoe_kernels_${isa}>)
  else()
    list(APPEND MAXMOE_MISSING_ISAS MAXMOE_WITHOUT_${isa})
  endif()
endforeach()
add_library(maxmoe_kernels STATIC ${MAXMOE_COMMON_SOURCES} ${MAXMOE_KERNEL_OBJECTS})
target_include_directories(maxmoe_kernels PUBLIC cpp)
target_link_libraries(maxmoe_kernels PUBLIC maxmoe_eigen)
target_compile_definitions(maxmoe_kernels PUBLIC ${MAXMOE_MISSING_ISAS})
