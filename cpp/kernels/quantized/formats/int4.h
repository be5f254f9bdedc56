// INT4: 0 to 15, of which a zero point is subtracted: 8 if none is given.
#pragma once

#include "kernels/quantized/codes.h"
#ifdef MAXMOE_ISA_NAMESPACE
#include "kernels/quantized/decoders.simd.h"
#endif

namespace maxmoe {

struct Int4 {
  static constexpr CodeTable kValuesWithZeros = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
  static constexpr CodeTable kSigned = {{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}};
  static constexpr Codes kCodes = {.bits = 4, .values = &kSigned, .values_with_zeros = &kValuesWithZeros};
  using Scales = FloatScales;
  static constexpr std::array<NamedFormat, 1> kNames = {{{"int4", 1, kAnyGroup}}};
};

#ifdef MAXMOE_ISA_NAMESPACE
namespace MAXMOE_ISA_NAMESPACE {

#if defined(__AVX2__)

// The codes as integers.
struct Int4Words : WordsOf<Int4> {
  static constexpr float kZero = 8.0F;

  MAXMOE_INLINE Floats value(const Words (&decoded)[kDecoded], int i) const {
    return __builtin_convertvector(std::bit_cast<SignedWords>(decoded[0] >> position(i) & 15U), Floats);
  }
};

template <>
struct DecodersOf<Int4> : TableDecoders<Int4> {
  using ForWords = Int4Words;
};

#endif

}  // namespace MAXMOE_ISA_NAMESPACE
#endif

}  // namespace maxmoe
