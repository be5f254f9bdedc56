# Eigen's headers: from the system, else from the PyPI package cmeel-eigen of the running Python.
# -DMAXMOE_EIGEN_INCLUDE_DIR=<folder that holds Eigen/Core> overrides both.
if(Python_EXECUTABLE)
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c "import sys; print(*(p + '/cmeel.prefix' for p in sys.path if p), sep=';', end='')"
    OUTPUT_VARIABLE MAXMOE_CMEEL_PREFIXES)
endif()
if(NOT EXISTS "${MAXMOE_EIGEN_INCLUDE_DIR}/Eigen/Core")  # the environment of an earlier build may be gone
  unset(MAXMOE_EIGEN_INCLUDE_DIR CACHE)
endif()
find_path(MAXMOE_EIGEN_INCLUDE_DIR Eigen/Core
  PATHS ${MAXMOE_CMEEL_PREFIXES}
  PATH_SUFFIXES eigen3 include/eigen3
  DOC "Folder that holds Eigen/Core")
if(NOT MAXMOE_EIGEN_INCLUDE_DIR)
  message(FATAL_ERROR
    "maxmoe needs the headers of Eigen 3.4 and found none. Install them with one of\n"
    "  pip install cmeel-eigen\n"
    "  apt install libeigen3-dev\n"
    "or pass -DMAXMOE_EIGEN_INCLUDE_DIR=<folder that holds Eigen/Core>.")
endif()
message(STATUS "Eigen: ${MAXMOE_EIGEN_INCLUDE_DIR}")

add_library(maxmoe_eigen INTERFACE)
target_include_directories(maxmoe_eigen SYSTEM INTERFACE ${MAXMOE_EIGEN_INCLUDE_DIR})
# No threads of Eigen, which would bypass the executor; and no code under the LGPL.
target_compile_definitions(maxmoe_eigen INTERFACE EIGEN_DONT_PARALLELIZE EIGEN_MPL2_ONLY)
