// Instruction sets: the ones that the processor supports, and kernels that are compiled once for each of them.
//
// Files *.simd.cpp are compiled four times, into the namespaces maxmoe::baseline, maxmoe::avx2, maxmoe::avx512 and
// maxmoe::avx512bf16; the macro MAXMOE_ISA_NAMESPACE is the name of the one that is being compiled. One translation
// unit per instruction set, because the width of vectors, the number of registers and Eigen's packets are chosen by
// macros of the compiler, which are constant within a translation unit. Headers *.simd.h are for these files alone. A
// kernel header declares
//
//     template <class T> struct RaggedGather { ... };
//     MAXMOE_KERNEL(ragged_gather, RaggedGather)
//
// and callers write maxmoe::ragged_gather(arguments, executor), which runs the variant of vector_isa(). Files *.amx.cpp
// are compiled twice, into maxmoe::amx and maxmoe::amx_emulated.
#pragma once

// For functions in headers that are outside of those namespaces. A function that is only `inline` becomes a weak
// symbol, of which the linker keeps one definition for all instruction sets. Baseline code could then run AVX-512
// instructions.
#define MAXMOE_INLINE __attribute__((always_inline)) inline
// Before MAXMOE_INLINE, for functions of views that CUDA kernels call as well (cpp/cuda).
#ifdef __CUDACC__
#define MAXMOE_DEVICE __host__ __device__
#else
#define MAXMOE_DEVICE
#endif
// For lambdas whose captures must stay in registers.
#define MAXMOE_INLINE_LAMBDA __attribute__((always_inline))

namespace maxmoe {

class Executor;

// In ascending order: each instruction set includes the previous ones. amx_emulated, for tests, runs on every processor
// and is never chosen by default: the product of amx, with tiles in memory and their instructions in plain code.
enum class Isa { baseline, avx2, avx512, avx512bf16, amx, amx_emulated };

inline constexpr Isa all_isas[] = {Isa::baseline, Isa::avx2, Isa::avx512, Isa::avx512bf16, Isa::amx, Isa::amx_emulated};

// The instruction set that kernels run with: the one that the environment variable MAXMOE_ISA names, otherwise the best
// one of this processor. The variable is read once. Throws std::invalid_argument, with the supported names, if it names
// an unknown or unsupported one.
Isa active_isa();

// The instruction set of the kernels that have no variant for matrix units: avx512bf16 for amx, the best one of this
// processor for amx_emulated. Only the product of bfloat16 has such a variant (kernels/product/amx).
Isa vector_isa();

// Whether this processor has the instruction set and this build has kernels for it. avx2 is x86-64-v3, avx512 is
// x86-64-v4, avx512bf16 is x86-64-v4 with AVX512-BF16 and AVX512-VBMI; of the processors with AVX512-BF16 only Cooper
// Lake lacks AVX512-VBMI. amx is avx512bf16 with AMX-TILE and AMX-BF16, if the system grants the process its tiles:
// Linux is asked for them here.
bool is_supported(Isa isa);

// The instruction set with the name `text`. Throws std::invalid_argument if it is unknown or unsupported.
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
// A build for one machine lacks the other instruction sets (MAXMOE_ISAS in cpp/cmake/kernels.cmake). Their cases are
// empty.
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

// Declares a kernel for every instruction set, and the function that calls the active one. To be used at file scope,
// outside of any namespace. Files that are compiled per instruction set see only the declarations: a dispatcher that is
// instantiated there would be a weak symbol, compiled for that instruction set.
#if defined(MAXMOE_ISA_NAMESPACE)
#define MAXMOE_KERNEL(kernel, Arguments) MAXMOE_DECLARE_KERNELS(kernel, Arguments)
#else
#define MAXMOE_KERNEL(kernel, Arguments)                                        \
  MAXMOE_DECLARE_KERNELS(kernel, Arguments)                                     \
  namespace maxmoe {                                                            \
  template <class T>                                                            \
  inline void kernel(const Arguments<T>& arguments, const Executor& executor) { \
    switch (vector_isa()) { MAXMOE_CASES(kernel) }                              \
  }                                                                             \
  }
#endif
