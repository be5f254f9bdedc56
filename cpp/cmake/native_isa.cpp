// Prints the best instruction set of this machine, for kernels.cmake.
#include <cstdio>

#include "kernels/isa/isa.cpp"

int main() {
  std::fputs(maxmoe::name(maxmoe::active_isa()), stdout);
}
