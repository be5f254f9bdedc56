// The values of codes.
#pragma once

#include <array>

#include "kernels/quantized/quantized_matrix.h"

namespace maxmoe {

struct CodeTable {
  alignas(64) std::array<float, 16> values;
};

// Not `inline`: the linker would keep one definition for all instruction sets.
// OCP Microscaling Formats, E2M1.
constexpr CodeTable kE2M1 = {{0.0F, 0.5F, 1.0F, 1.5F, 2.0F, 3.0F, 4.0F, 6.0F,  //
                              -0.0F, -0.5F, -1.0F, -1.5F, -2.0F, -3.0F, -4.0F, -6.0F}};
// QLoRA (arXiv:2305.14314), appendix E.
constexpr CodeTable kNF4 = {{-1.0F, -0.6961928009986877F, -0.5250730514526367F, -0.39491748809814453F,
                             -0.28444138169288635F, -0.18477343022823334F, -0.09105003625154495F, 0.0F,
                             0.07958029955625534F, 0.16093020141124725F, 0.24611230194568634F, 0.33791524171829224F,
                             0.44070982933044434F, 0.5626170039176941F, 0.7229568362236023F, 1.0F}};
// INT4: the codes themselves with zero points, the codes less 8 without.
constexpr CodeTable kUnsigned4 = {{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}};
constexpr CodeTable kSigned4 = {{-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7}};

MAXMOE_INLINE const CodeTable& table_of(Codes codes, bool has_zeros) {
  if (codes == Codes::e2m1) return kE2M1;
  if (codes == Codes::nf4) return kNF4;
  return has_zeros ? kUnsigned4 : kSigned4;
}

// With scales between these no value of a code becomes subnormal or infinite: values are between 2^-9 and 2^9.
constexpr float kSmallestScale = 0x1p-100F;
constexpr float kLargestScale = 0x1p100F;

// The magnitudes of E4M3.
struct E4M3Magnitudes {
  alignas(64) float values[128];
};

constexpr E4M3Magnitudes e4m3_magnitudes() {
  E4M3Magnitudes result{};
  for (int code = 0; code < 127; ++code) {
    float value = static_cast<float>(code < 8 ? code : 8 + code % 8) * 0x1p-9F;
    for (int exponent = 1; exponent < code / 8; ++exponent) value *= 2.0F;
    result.values[code] = value;
  }
  result.values[127] = __builtin_nanf("");
  return result;
}

constexpr E4M3Magnitudes kE4M3 = e4m3_magnitudes();

}  // namespace maxmoe
