// The four floating-point types of the kernels, and the type in which sums of each are accumulated.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "kernels/isa/isa.h"

namespace maxmoe {

// Types for storage only. Arithmetic is done in Accumulator<T>, because C++20 has no arithmetic on 16-bit floats.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

// The type in which sums of T are accumulated: with 8 or 11 significant bits, long sums would lose small terms.
template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// PyTorch's name of the type.
template <class T>
MAXMOE_INLINE constexpr const char* dtype_name() {
  if (std::is_same_v<T, double>) return "float64";
  if (std::is_same_v<T, float>) return "float32";
  return std::is_same_v<T, BFloat16> ? "bfloat16" : "float16";
}

// T to Accumulator<T>, exactly.
MAXMOE_INLINE double widen(double value) {
  return value;
}
MAXMOE_INLINE float widen(float value) {
  return value;
}
MAXMOE_INLINE float widen(BFloat16 value) {
  // A bfloat16 is the upper half of a float.
  return std::bit_cast<float>(uint32_t{value.bits} << 16);
}

MAXMOE_INLINE float widen(Float16 value) {
  // The exponent bias of float is 112 larger than the bias of float16. Multiplying with 2^112 corrects it, and makes
  // numbers that are subnormal in float16 normal.
  const uint32_t magnitude = (uint32_t{value.bits} & 0x7fffU) << 13;
  const uint32_t sign = (uint32_t{value.bits} & 0x8000U) << 16;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112F;
  const uint32_t infinite_or_nan = magnitude >= (0x7c00U << 13) ? 0x7f800000U : 0U;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | infinite_or_nan | sign);
}

// Accumulator<T> to T, rounded to nearest, ties to even.
template <class T>
MAXMOE_INLINE T narrow(Accumulator<T> value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;  // the quiet bit keeps it a NaN when it is cut off
    // Adds just less than half of the last bit that is kept, and a half if that bit is odd: ties go to even.
    const uint32_t rounded = bits + 0x7fffU + ((bits >> 16) & 1U);
    return {static_cast<uint16_t>(is_nan ? (bits >> 16) | 0x40U : rounded >> 16)};
  } else if constexpr (std::is_same_v<T, Float16>) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000U;
    const uint32_t magnitude = bits & 0x7fffffffU;
    uint32_t half = 0;
    if (magnitude > 0x7f800000U) {
      half = 0x7e00U;                        // NaN
    } else if (magnitude >= (143U << 23)) {  // 2^16 and above
      half = 0x7c00U;
    } else if (magnitude < (113U << 23)) {
      // Below 2^-14 the result is subnormal. Its last bit, 2^-24, is also the last bit of a float at 0.5: the addition
      // rounds to it.
      half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000U;
    } else {  // a carry out of the mantissa increments the exponent, at most to infinity
      half = (magnitude - (112U << 23) + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
    }
    return {static_cast<uint16_t>(half | sign)};
  } else {
    return value;
  }
}

}  // namespace maxmoe

// Explicit instantiations for the four types. The templates are defined in .cpp files, one object per instruction set,
// and callers see declarations only.
#define MAXMOE_FOR_EACH_TYPE(instantiate) \
  instantiate(double) instantiate(float) instantiate(BFloat16) instantiate(Float16)

// The same for a kernel.
#define MAXMOE_INSTANTIATE(name, Arguments)                                  \
  template void name<double>(const Arguments<double>&, const Executor&);     \
  template void name<float>(const Arguments<float>&, const Executor&);       \
  template void name<BFloat16>(const Arguments<BFloat16>&, const Executor&); \
  template void name<Float16>(const Arguments<Float16>&, const Executor&);
