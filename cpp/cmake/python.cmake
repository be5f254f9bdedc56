# maxmoe._C, a module for each torch and each Python whose headers are in MAXMOE_PYTHON_HEADERS, a list of folders:
# maxmoe/torch2.13/_C.cpython-311-x86_64-linux-gnu.so, ... maxmoe/_C.py loads the one that fits. No other Python than the
# one that builds is started, and the same headers of torch serve each Python.

execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import pybind11; print(pybind11.get_include(), end='')"
  OUTPUT_VARIABLE MAXMOE_PYBIND11 RESULT_VARIABLE MAXMOE_PYBIND11_FAILED)
if(MAXMOE_PYBIND11_FAILED)
  message(FATAL_ERROR "${Python_EXECUTABLE} has no pybind11: pip install pybind11")
endif()

execute_process(
  COMMAND ${Python_EXECUTABLE} -c "import sysconfig as s; print(s.get_path('include'), s.get_config_var('EXT_SUFFIX'), sep=';', end='')"
  OUTPUT_VARIABLE found)
list(GET found 0 headers)
list(GET found 1 MAXMOE_PYTHON_SUFFIX)
set(MAXMOE_PYTHON_HEADERS ${headers} CACHE STRING "Folders of Python.h")

file(GLOB MAXMOE_PYTHON_SOURCES CONFIGURE_DEPENDS cpp/python/*.cpp)
foreach(headers IN LISTS MAXMOE_PYTHON_HEADERS)
  if(NOT EXISTS ${headers}/patchlevel.h)
    message(FATAL_ERROR "no headers of Python in ${headers}. On Debian or Ubuntu: sudo apt-get install python3-dev")
  endif()
  file(STRINGS ${headers}/patchlevel.h version REGEX "^#define PY_M(AJOR|INOR)_VERSION")
  string(REGEX REPLACE "[^0-9]+" "" version "${version}")
  # The suffix of the Python that builds, with the version of the headers.
  string(REGEX REPLACE "cpython-[0-9]+" "cpython-${version}" suffix "${MAXMOE_PYTHON_SUFFIX}")
  foreach(minor IN LISTS MAXMOE_TORCH_MINORS)
    string(REPLACE "_" "." release ${minor})
    set(module maxmoe_python${version}_${minor})
    add_library(${module} MODULE ${MAXMOE_PYTHON_SOURCES})
    # First: torch has a pybind11 of its own among its headers. The parent, because Debian's pyconfig.h names the header of
    # the architecture relative to it.
    target_include_directories(${module} SYSTEM BEFORE PRIVATE ${MAXMOE_PYBIND11} ${headers} ${headers}/..)
    target_include_directories(${module} PRIVATE cpp)
    target_link_libraries(${module} PRIVATE maxmoe_library_${minor} ${MAXMOE_TORCH_FOLDER_${minor}}/lib/libtorch_python.so)
    target_compile_options(${module} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
    # The symbols of Python are in the interpreter.
    target_link_options(${module} PRIVATE -Wl,--as-needed -Wl,--allow-shlib-undefined)
    set_target_properties(${module} PROPERTIES
      PREFIX "" OUTPUT_NAME _C SUFFIX ${suffix} LIBRARY_OUTPUT_DIRECTORY torch${release}
      UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 0 INSTALL_RPATH "$ORIGIN/..;$ORIGIN/../../torch/lib")
    install(TARGETS ${module} LIBRARY DESTINATION torch${release} COMPONENT maxmoe_package)
  endforeach()
endforeach()
