// Macros and constants of the instruction set that a file is compiled for, beyond the compiler's own macros.
//
// The macros here are always defined, as 0 or 1, and tested with #if: a file that does not include this header does not
// compile (-Werror=undef in cpp/cmake/kernels.cmake), where #ifdef would take the other branch in silence.
#pragma once

// Whether quantized values are decoded to pairs of bfloat16 with AVX512-BF16 and AVX512-VBMI, which is several times as
// fast as vectors of float.
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
#define MAXMOE_DECODES_PAIRS 1
#else
#define MAXMOE_DECODES_PAIRS 0
#endif

// Tests set it to 1 to multiply pairs in plain arithmetic, on processors without AVX512-BF16.
#ifndef MAXMOE_BFLOAT16_PAIRS
#define MAXMOE_BFLOAT16_PAIRS 0
#endif

// Tests set it to 1 to count the elements that are packed.
#ifndef MAXMOE_COUNT_PACKED
#define MAXMOE_COUNT_PACKED 0
#endif

// 1 where tiles of AMX are emulated: vectors have 64 bytes, as beside the tiles of a processor, and compilers divide
// them into the registers of the processor.
#ifndef MAXMOE_EMULATES_TILES
#define MAXMOE_EMULATES_TILES 0
#endif

namespace maxmoe::MAXMOE_ISA_NAMESPACE {

// Size and number of the vector registers.
#if defined(__AVX512F__) || MAXMOE_EMULATES_TILES  // zmm0 to zmm31
constexpr int kVectorBytes = 64;
constexpr int kVectorRegisters = 32;
#elif defined(__AVX2__)     // ymm0 to ymm15
constexpr int kVectorBytes = 32;
constexpr int kVectorRegisters = 16;
#elif defined(__aarch64__)  // v0 to v31
constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 32;
#else                       // xmm0 to xmm15
constexpr int kVectorBytes = 16;
constexpr int kVectorRegisters = 16;
#endif

// Whether products of bfloat16 multiply pairs.
#if defined(__AVX512BF16__)
constexpr bool kMultipliesPairs = true;
#else
constexpr bool kMultipliesPairs = MAXMOE_BFLOAT16_PAIRS != 0 || MAXMOE_EMULATES_TILES != 0;
#endif

}  // namespace maxmoe::MAXMOE_ISA_NAMESPACE
