# GoogleTest as GTest::gtest_main: from the system, else downloaded.
find_package(GTest QUIET)
if(NOT GTest_FOUND)
  include(FetchContent)
  set(INSTALL_GTEST OFF)
  set(BUILD_GMOCK OFF)
  FetchContent_Declare(googletest
    URL https://github.com/google/googletest/releases/download/v1.17.0/googletest-1.17.0.tar.gz
    URL_HASH SHA256=65fab701d9829d38cb77c14acdc431d2108bfdbf8979e40eb8ae567edf10b27c
    TLS_VERIFY ON)
  message(STATUS
    "No GoogleTest on this system, downloading it. If that fails, install it (apt install libgtest-dev) or pass "
    "-DFETCHCONTENT_SOURCE_DIR_GOOGLETEST=<its source folder>.")
  FetchContent_MakeAvailable(googletest)
  # Warnings in its sources are not ours; MAXMOE_DEVELOPER makes them errors.
  target_compile_options(gtest PRIVATE -w)
  target_compile_options(gtest_main PRIVATE -w)
endif()
