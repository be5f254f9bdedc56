// The four floating-point types of the kernels, and the type in which each is accumulated.
#pragma once

#include <bit>
#include <cstdint>
#include <type_traits>

#include "isa.h"

namespace maxmoe {

// Storage only: arithmetic is done in Accumulator<T>.
struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

template <class T>
using Accumulator = std::conditional_t<std::is_same_v<T, double>, double, float>;

// PyTorch's name of the type.
template <class T>
MAXMOE_INLINE constexpr const char* dtype_name() {
  if (std::is_same_v<T, double>) return "float64";
  if (std::is_same_v<T, float>) return "float32";
  return std::is_same_v<T, BFloat16> ? "bfloat16" : "float16";
}

MAXMOE_INLINE double widen(double value) {
  return value;
}
MAXMOE_INLINE float widen(float value) {
  return value;
}
MAXMOE_INLINE float widen(BFloat16 value) {
  return std::bit_cast<float>(uint32_t{value.bits} << 16);
}

MAXMOE_INLINE float widen(Float16 value) {
  // The float's exponent is 112 larger; a product with 2^112 moves it there and makes subnormals normal.
  const uint32_t magnitude = (uint32_t{value.bits} & 0x7fffU) << 13;
  const uint32_t sign = (uint32_t{value.bits} & 0x8000U) << 16;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112F;
  const uint32_t infinite_or_nan = magnitude >= (0x7c00U << 13) ? 0x7f800000U : 0U;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(scaled) | infinite_or_nan | sign);
}

// Rounds to nearest, ties to even.
template <class T>
MAXMOE_INLINE T narrow(Accumulator<T> value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    const auto bits = std::bit_cast<uint32_t>(value);
    const bool is_nan = (bits & 0x7fffffffU) > 0x7f800000U;  // with the quiet bit it stays one when cut off
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
      // Below 2^-14. The last bits of a float at 0.5 and of a subnormal are both 2^-24: the addition rounds to it.
      half = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5F) - 0x3f000000U;
    } else {  // a carry out of the mantissa may round up to infinity
      half = (magnitude - (112U << 23) + 0xfffU + ((magnitude >> 13) & 1U)) >> 13;
    }
    return {static_cast<uint16_t>(half | sign)};
  } else {
    return value;
  }
}

}  // namespace maxmoe

// The instantiations that every kernel over floating types ends with.
#define MAXMOE_INSTANTIATE(name, Arguments)                                  \
  template void name<double>(const Arguments<double>&, const Executor&);     \
  template void name<float>(const Arguments<float>&, const Executor&);       \
  template void name<BFloat16>(const Arguments<BFloat16>&, const Executor&); \
  template void name<Float16>(const Arguments<Float16>&, const Executor&);
