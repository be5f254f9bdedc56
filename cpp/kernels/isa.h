// Instruction sets: which ones the processor supports, and kernels compiled once for each of them.
//
// Every kernel file is compiled four times from the same source, into the namespaces maxmoe::baseline, maxmoe::avx2,
// maxmoe::avx512 and maxmoe::avx512bf16 (the macro MAXMOE_ISA_NAMESPACE is the name of the one being compiled). A
// kernel header declares
//
//     template <class T> struct RaggedGather { ... };
//     MAXMOE_KERNEL(ragged_gather, RaggedGather)
//
// and callers write maxmoe::ragged_gather(arguments, executor), which runs the variant of active_isa().
#pragma once

// For functions in headers that are outside of those namespaces. An ordinary inline function becomes a weak symbol, of
// which the linker keeps one definition for all instruction sets: baseline code could then run AVX-512 instructions.
#define MAXMOE_INLINE __attribute__((always_inline)) inline

namespace maxmoe {

class Executor;

enum class Isa { baseline, avx2, avx512, avx512bf16 };

inline constexpr Isa all_isas[] = {Isa::baseline, Isa::avx2, Isa::avx512, Isa::avx512bf16};

// The best instruction set of this processor, or the one that the environment variable MAXMOE_ISA names, which is read
// once. Throws std::invalid_argument, with the supported names, for an unknown or unsupported one.
Isa active_isa();

// Whether this processor has the instruction set (avx2: x86-64-v3, avx512: x86-64-v4, avx512bf16: x86-64-v4 and
// AVX512-BF16) and this build has kernels for it.
bool is_supported(Isa isa);

// The instruction set of that name. Throws std::invalid_argument if it is unknown or unsupported.
Isa parse_isa(const char* text);

const char* name(Isa isa);

}  // namespace maxmoe

#define MAXMOE_DECLARE_KERNEL(isa, kernel, Arguments)                   \
  namespace maxmoe::isa {                                               \
  template <class T>                                                    \
  void kernel(const Arguments<T>& arguments, const Executor& executor); \
  }

#if defined(__x86_64__)
#define MAXMOE_DECLARE_KERNELS(kernel, Arguments)    \
  MAXMOE_DECLARE_KERNEL(baseline, kernel, Arguments) \
  MAXMOE_DECLARE_KERNEL(avx2, kernel, Arguments)     \
  MAXMOE_DECLARE_KERNEL(avx512, kernel, Arguments)   \
  MAXMOE_DECLARE_KERNEL(avx512bf16, kernel, Arguments)
#define MAXMOE_CASES(kernel)      \
  MAXMOE_CASE_avx512bf16(kernel); \
  MAXMOE_CASE_avx512(kernel);     \
  MAXMOE_CASE_avx2(kernel);       \
  default:                        \
    return baseline::kernel(arguments, executor);
#define MAXMOE_CASE(isa, kernel) \
  case Isa::isa:                 \
    return isa::kernel(arguments, executor)
// A build for one machine is without the others (MAXMOE_ISAS in cpp/cmake/kernels.cmake).
#ifdef MAXMOE_WITHOUT_avx512bf16
#define MAXMOE_CASE_avx512bf16(kernel)
#else
#define MAXMOE_CASE_avx512bf16(kernel) MAXMOE_CASE(avx512bf16, kernel)
#endif
#ifdef MAXMOE_WITHOUT_avx512
#define MAXMOE_CASE_avx512(kernel)
#else
#define MAXMOE_CASE_avx512(kernel) MAXMOE_CASE(avx512, kernel)
#endif
#ifdef MAXMOE_WITHOUT_avx2
#define MAXMOE_CASE_avx2(kernel)
#else
#define MAXMOE_CASE_avx2(kernel) MAXMOE_CASE(avx2, kernel)
#endif
#else
#define MAXMOE_DECLARE_KERNELS(kernel, Arguments) MAXMOE_DECLARE_KERNEL(baseline, kernel, Arguments)
#define MAXMOE_CASES(kernel) \
  default:                   \
    return baseline::kernel(arguments, executor);
#endif

// Used at file scope, outside of any namespace. Files that are compiled per instruction set see the declarations only:
// a dispatcher instantiated there would be a weak symbol with the instructions of one of them.
#if defined(MAXMOE_ISA_NAMESPACE)
#define MAXMOE_KERNEL(kernel, Arguments) MAXMOE_DECLARE_KERNELS(kernel, Arguments)
#else
#define MAXMOE_KERNEL(kernel, Arguments)                                        \
  MAXMOE_DECLARE_KERNELS(kernel, Arguments)                                     \
  namespace maxmoe {                                                            \
  template <class T>                                                            \
  inline void kernel(const Arguments<T>& arguments, const Executor& executor) { \
    switch (active_isa()) { MAXMOE_CASES(kernel) }                              \
  }                                                                             \
  }
#endif
