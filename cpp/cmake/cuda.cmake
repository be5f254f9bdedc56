# libmaxmoe_cuda.so: the kernels of cpp/cuda for NVIDIA GPUs, which the operators open at run time. It links neither
# torch nor Python, so that one library serves all versions of them. It needs nvcc alone: of a CUDA toolkit, of PyPI
# (nvidia-cuda-nvcc, -cuda-crt, -nvvm, -cuda-runtime and -cuda-cccl), or the one that MAXMOE_NVCC names.
set(MAXMOE_CUDA auto CACHE STRING "CUDA kernels: on, off, or auto for on if there are an nvcc and a torch with CUDA")
if(NOT MAXMOE_CUDA MATCHES "^(auto|on|off)$")
  message(FATAL_ERROR "MAXMOE_CUDA must be auto, on or off, got ${MAXMOE_CUDA}")
endif()
if(MAXMOE_CUDA STREQUAL "off")
  return()
endif()

if(MAXMOE_CUDA STREQUAL "auto")
  set(MAXMOE_CUDA_TORCH)
  foreach(folder IN LISTS MAXMOE_TORCH)
    file(STRINGS ${folder}/version.py cuda REGEX "^cuda.*= '")
    list(APPEND MAXMOE_CUDA_TORCH ${cuda})
  endforeach()
  if(NOT MAXMOE_CUDA_TORCH)
    message(STATUS "no CUDA kernels, since torch has no CUDA")
    return()
  endif()
endif()

if(Python_EXECUTABLE)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import glob, sys; print(*(f for p in sys.path for f in glob.glob(p + '/nvidia/cu1*/bin')), sep=';', end='')"
    OUTPUT_VARIABLE MAXMOE_NVCC_FOLDERS)
endif()
find_program(MAXMOE_NVCC nvcc HINTS $ENV{CUDA_HOME}/bin PATHS ${MAXMOE_NVCC_FOLDERS} /usr/local/cuda/bin)
if(NOT MAXMOE_NVCC)
  if(MAXMOE_CUDA STREQUAL "on")
    message(FATAL_ERROR "MAXMOE_CUDA is on, and there is no nvcc: put it on the PATH, or set CUDA_HOME or -DMAXMOE_NVCC=<file>")
  endif()
  message(STATUS "no CUDA kernels, since there is no nvcc")
  return()
endif()
message(STATUS "CUDA kernels: ${MAXMOE_NVCC}")
get_filename_component(MAXMOE_CUDA_HOME ${MAXMOE_NVCC} DIRECTORY)
get_filename_component(MAXMOE_CUDA_HOME ${MAXMOE_CUDA_HOME} DIRECTORY)

# Machine code for compute capability 8.0, 9.0, 10.0 and 12.0, and PTX for later ones, as in `make cuda`.
set(MAXMOE_NVCC_FLAGS -std=c++20 -O3 --expt-relaxed-constexpr -compress-mode=size -I${PROJECT_SOURCE_DIR}/cpp
  -ccbin ${CMAKE_CXX_COMPILER} -Xcompiler=-fPIC,-Wall -gencode=arch=compute_80,code=[sm_80,sm_90]
  -gencode=arch=compute_100,code=[sm_100,sm_120,compute_100])
file(GLOB MAXMOE_CU_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cpp/cuda/*.cu)
file(GLOB_RECURSE MAXMOE_CU_HEADERS CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cpp/cuda/*.h ${PROJECT_SOURCE_DIR}/cpp/kernels/*.h)
set(MAXMOE_CU_OBJECTS)
foreach(source IN LISTS MAXMOE_CU_SOURCES)
  get_filename_component(name ${source} NAME_WE)
  set(object ${CMAKE_CURRENT_BINARY_DIR}/cuda/${name}.o)
  add_custom_command(OUTPUT ${object} DEPENDS ${source} ${MAXMOE_CU_HEADERS}
    COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_CURRENT_BINARY_DIR}/cuda
    COMMAND ${MAXMOE_NVCC} ${MAXMOE_NVCC_FLAGS} -c ${source} -o ${object}
    COMMENT "nvcc ${name}.cu" VERBATIM)
  list(APPEND MAXMOE_CU_OBJECTS ${object})
endforeach()
set(library ${CMAKE_CURRENT_BINARY_DIR}/libmaxmoe_cuda.so)
add_custom_command(OUTPUT ${library} DEPENDS ${MAXMOE_CU_OBJECTS}
  COMMAND ${MAXMOE_NVCC} -shared -cudart static -ccbin ${CMAKE_CXX_COMPILER} -L${MAXMOE_CUDA_HOME}/lib
    -Xlinker --exclude-libs=ALL -Xlinker --strip-all ${MAXMOE_CU_OBJECTS} -o ${library}
  COMMENT "libmaxmoe_cuda.so" VERBATIM)
add_custom_target(maxmoe_cuda ALL DEPENDS ${library})
install(FILES ${library} DESTINATION . COMPONENT maxmoe_package)
