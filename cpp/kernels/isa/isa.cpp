// Compiled once, without options for an instruction set: it runs before one is chosen.
#include "kernels/isa/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace maxmoe {

namespace {

#if defined(__x86_64__)
// Tests the features of x86-64-v3 and x86-64-v4 one by one, because __builtin_cpu_supports accepts the names of the
// levels only in newer compilers. It also checks that the operating system saves the wide registers.
[[maybe_unused]] bool has_avx2() {
  return __builtin_cpu_supports("avx") && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2") && __builtin_cpu_supports("fma");
}

[[maybe_unused]] bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

[[maybe_unused]] bool has_avx512bf16() {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi");
}
#endif

std::string supported_names() {
  std::string names;
  for (const Isa isa : all_isas) {
    if (is_supported(isa)) {
      names += std::string(names.empty() ? "" : ", ") + name(isa);
    }
  }
  return names;
}

Isa best_isa() {
  Isa best = Isa::baseline;
  for (const Isa isa : all_isas) {
    // all_isas is sorted by width, so that the last supported one is the best.
    best = is_supported(isa) ? isa : best;
  }
  return best;
}

Isa chosen_isa() {
  const char* text = std::getenv("MAXMOE_ISA");
  return text == nullptr || *text == '\0' ? best_isa() : parse_isa(text);
}

}  // namespace

Isa active_isa() {
  // Read once: kernels of two instruction sets in one process could return different bits for the same input.
  static const Isa isa = chosen_isa();
  return isa;
}

// An instruction set that this build lacks has no case: it is unsupported on every processor.
bool is_supported(Isa isa) {
  switch (isa) {
#if defined(__x86_64__) && !defined(MAXMOE_WITHOUT_avx512bf16)
    case Isa::avx512bf16:
      return has_avx512bf16();
#endif
#if defined(__x86_64__) && !defined(MAXMOE_WITHOUT_avx512)
    case Isa::avx512:
      return has_avx512();
#endif
#if defined(__x86_64__) && !defined(MAXMOE_WITHOUT_avx2)
    case Isa::avx2:
      return has_avx2();
#endif
    case Isa::baseline:
      return true;
    default:
      return false;
  }
}

Isa parse_isa(const char* text) {
  for (const Isa isa : all_isas) {
    if (std::string(text) == name(isa) && is_supported(isa)) {
      return isa;
    }
  }
  throw std::invalid_argument("MAXMOE_ISA must be one of the instruction sets of this processor and this build (" +
                              supported_names() + "), got '" + text + "'");
}

const char* name(Isa isa) {
  static constexpr const char* kNames[] = {"baseline", "avx2", "avx512", "avx512bf16"};  // in the order of Isa
  return kNames[static_cast<int>(isa)];
}

}  // namespace maxmoe
