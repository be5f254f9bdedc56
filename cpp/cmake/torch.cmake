# MAXMOE_TORCH, a list of folders of torch: for each one a target maxmoe_torch_<major>_<minor>, whose names are in
# MAXMOE_TORCH_MINORS. Not find_package(Torch): with a CUDA build of torch it demands a whole CUDA toolkit, and
# it finds one torch alone. torch is not imported, so that its dependencies need not be installed.

# Without -fopenmp at::parallel_for, a template in a header, is silently serial. The flags, not the target
# OpenMP::OpenMP_CXX: its library path would take precedence over the libgomp that torch ships.
find_package(OpenMP REQUIRED COMPONENTS CXX)
separate_arguments(MAXMOE_OPENMP_FLAGS UNIX_COMMAND "${OpenMP_CXX_FLAGS}")

if(NOT MAXMOE_TORCH)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "from importlib.util import find_spec; print(*find_spec('torch').submodule_search_locations, end='')"
    OUTPUT_VARIABLE MAXMOE_TORCH RESULT_VARIABLE MAXMOE_TORCH_FAILED)
  if(MAXMOE_TORCH_FAILED)
    message(FATAL_ERROR "${Python_EXECUTABLE} has no torch, and MAXMOE_TORCH names none")
  endif()
endif()

set(MAXMOE_TORCH_MINORS)
foreach(folder IN LISTS MAXMOE_TORCH)
  file(STRINGS ${folder}/version.py version REGEX "^__version__ = ")
  string(REGEX REPLACE "^__version__ = '(.*)'$" "\\1" version "${version}")
  string(REGEX REPLACE "^([0-9]+)\\.([0-9]+).*" "\\1_\\2" minor "${version}")
  message(STATUS "torch ${version}: ${folder}")
  list(APPEND MAXMOE_TORCH_MINORS ${minor})
  set(MAXMOE_TORCH_VERSION_${minor} ${version})
  set(MAXMOE_TORCH_FOLDER_${minor} ${folder})

  add_library(maxmoe_torch_${minor} INTERFACE)
  target_include_directories(maxmoe_torch_${minor} SYSTEM INTERFACE
    ${folder}/include ${folder}/include/torch/csrc/api/include)
  foreach(library torch torch_cpu c10)
    target_link_libraries(maxmoe_torch_${minor} INTERFACE ${folder}/lib/lib${library}.so)
  endforeach()
  target_compile_options(maxmoe_torch_${minor} INTERFACE ${MAXMOE_OPENMP_FLAGS})
  target_link_options(maxmoe_torch_${minor} INTERFACE ${MAXMOE_OPENMP_FLAGS})
endforeach()
