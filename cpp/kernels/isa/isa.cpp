// Compiled once, without options for an instruction set: it runs before one is chosen.
#include "kernels/isa/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

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

// Whether the processor has AMX-TILE and AMX-BF16, and the system lets this process use tiles. __builtin_cpu_supports
// knows these features in newer compilers alone.
[[maybe_unused]] bool has_amx() {
#if defined(__linux__)
  constexpr unsigned kTile = 1U << 24;
  constexpr unsigned kBFloat16 = 1U << 22;
  unsigned eax = 0;
  unsigned ebx = 0;
  unsigned ecx = 0;
  unsigned edx = 0;
  if (!has_avx512bf16() || __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kTile) == 0 || (edx & kBFloat16) == 0) return false;
  // Tiles take 8 KiB of a thread's state. Linux saves them for processes that have asked, and refuses where a signal
  // stack is too small for them or a filter of system calls forbids it. Without permission the first use is SIGILL.
  constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr int kTileData = 18;               // XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
  return false;
#endif
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

// The best supported instruction set up to `last`.
Isa best_isa(Isa last) {
  Isa best = Isa::baseline;
  for (const Isa isa : all_isas) {
    // all_isas is in ascending order, so that the last supported one is the best.
    best = isa <= last && is_supported(isa) ? isa : best;
  }
  return best;
}

Isa chosen_isa() {
  const char* text = std::getenv("MAXMOE_ISA");
  return text == nullptr || *text == '\0' ? best_isa(Isa::amx) : parse_isa(text);
}

}  // namespace

Isa active_isa() {
  // Read once: kernels of two instruction sets in one process could return different bits for the same input.
  static const Isa isa = chosen_isa();
  return isa;
}

Isa vector_isa() {
  static const Isa isa = active_isa() < Isa::amx ? active_isa() : best_isa(Isa::avx512bf16);
  return isa;
}

// An instruction set that this build lacks has no case: it is unsupported on every processor.
bool is_supported(Isa isa) {
  switch (isa) {
    case Isa::amx_emulated:
      return true;
#if defined(__x86_64__) && !defined(MAXMOE_WITHOUT_amx)
    case Isa::amx:
      return has_amx();
#endif
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
  static constexpr const char* kNames[] = {"baseline",   "avx2", "avx512",
                                           "avx512bf16", "amx",  "amx_emulated"};  // in the order of Isa
  return kNames[static_cast<int>(isa)];
}

}  // namespace maxmoe
