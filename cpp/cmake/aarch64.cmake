# Toolchain of `make test-aarch64`: Debian's cross-compiler and emulator.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L /usr/aarch64-linux-gnu)
# GoogleTest is compiled from Debian's sources: the library of the system is for the machine that compiles.
set(CMAKE_DISABLE_FIND_PACKAGE_GTest ON)
set(FETCHCONTENT_SOURCE_DIR_GOOGLETEST /usr/src/googletest CACHE PATH "Sources of GoogleTest")
