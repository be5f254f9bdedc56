# The torch of the running Python as the target maxmoe_torch.
# Not find_package(Torch): with a CUDA build of torch it demands a whole CUDA toolkit, and it leaves torch_python out.
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
execute_process(
  COMMAND ${Python_EXECUTABLE} -W ignore -c
    "import os, torch; print(os.path.dirname(torch.__file__), torch.__version__, int(torch._C._GLIBCXX_USE_CXX11_ABI), sep=';', end='')"
  OUTPUT_VARIABLE MAXMOE_TORCH
  RESULT_VARIABLE MAXMOE_TORCH_FAILED)
if(MAXMOE_TORCH_FAILED)
  message(FATAL_ERROR "${Python_EXECUTABLE} cannot import torch: install torch before maxmoe, for example\n"
    "  pip install torch==2.13.0")
endif()
list(GET MAXMOE_TORCH 0 MAXMOE_TORCH_DIR)
list(GET MAXMOE_TORCH 1 MAXMOE_TORCH_VERSION)
list(GET MAXMOE_TORCH 2 MAXMOE_TORCH_CXX11_ABI)
if(MAXMOE_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "maxmoe needs torch 2.11 or newer, found ${MAXMOE_TORCH_VERSION} in ${MAXMOE_TORCH_DIR}")
endif()
message(STATUS "torch ${MAXMOE_TORCH_VERSION}: ${MAXMOE_TORCH_DIR}")

add_library(maxmoe_torch INTERFACE)
target_include_directories(maxmoe_torch SYSTEM INTERFACE
  ${MAXMOE_TORCH_DIR}/include ${MAXMOE_TORCH_DIR}/include/torch/csrc/api/include)
foreach(library torch torch_cpu c10 torch_python)
  find_library(MAXMOE_LIB_${library} ${library} PATHS ${MAXMOE_TORCH_DIR}/lib NO_DEFAULT_PATH NO_CACHE REQUIRED)
  target_link_libraries(maxmoe_torch INTERFACE ${MAXMOE_LIB_${library}})
endforeach()
if(NOT MAXMOE_TORCH_CXX11_ABI)
  target_compile_definitions(maxmoe_torch INTERFACE _GLIBCXX_USE_CXX11_ABI=0)
endif()

# Without -fopenmp at::parallel_for, a template in a header, is silently serial. The flags, not the target
# OpenMP::OpenMP_CXX: its library path would take precedence over the libgomp that torch ships.
find_package(OpenMP REQUIRED COMPONENTS CXX)
separate_arguments(MAXMOE_OPENMP_FLAGS UNIX_COMMAND "${OpenMP_CXX_FLAGS}")
target_compile_options(maxmoe_torch INTERFACE ${MAXMOE_OPENMP_FLAGS})
target_link_options(maxmoe_torch INTERFACE ${MAXMOE_OPENMP_FLAGS})
