// What the format of quantized weights says of its codes and scales. A code is a quantized value as it is stored.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "kernels/matrix/dtype.h"

namespace maxmoe {

struct CodeTable {
  alignas(64) std::array<float, 16> values;
};

// The type of numbers that 8-bit codes are.
enum class ByteType { none, int8, float8_e4m3 };

struct Codes {
  int bits;                                      // 4 or 8
  bool is_high_first = false;                    // whether the first of two 4-bit codes is in the high half of a byte
  const CodeTable* values = nullptr;             // of 4-bit codes
  const CodeTable* values_with_zeros = nullptr;  // less a zero point each; null if the format has no zero points
  ByteType type = ByteType::none;
};

// The types of scales. E8M0 is the exponent of a power of two, 2^(byte - 127).
enum class ScaleType { e8m0, e4m3, float32, bfloat16, float16 };

template <ScaleType... kType>
struct ScaleTypes {
  static constexpr std::array kAll = {kType...};
};
using FloatScales = ScaleTypes<ScaleType::float32, ScaleType::bfloat16, ScaleType::float16>;

// A name of published checkpoints: the codes of a format, and the shape of a block that shares a scale. kWholeRow: a
// block is a whole row; kAnyGroup: the number of columns, a power of two, follows from the number of scales.
struct NamedFormat {
  const char* name;
  int64_t rows_per_scale;
  int64_t columns_per_scale;
  bool has_row_scales = false;  // whether each row has a float that its scales are multiplied by
};
constexpr int64_t kWholeRow = 0;
constexpr int64_t kAnyGroup = -1;

// Magnitudes of E4M3 of the OCP 8-bit floating-point formats: 4 bits of exponent and 3 of mantissa, no infinity.
struct E4M3Magnitudes {
  alignas(64) float values[128];
};
inline constexpr E4M3Magnitudes kE4M3Magnitudes = [] {
  E4M3Magnitudes result{};
  for (int code = 0; code < 127; ++code) {
    float value = static_cast<float>(code < 8 ? code : 8 + code % 8) * 0x1p-9F;
    for (int exponent = 1; exponent < code / 8; ++exponent) value *= 2.0F;
    result.values[code] = value;
  }
  result.values[127] = __builtin_nanf("");
  return result;
}();
MAXMOE_INLINE float value_of_e4m3(uint8_t code) {
  return code < 128 ? kE4M3Magnitudes.values[code] : -kE4M3Magnitudes.values[code - 128];
}

MAXMOE_INLINE float read_scale(ScaleType type, const std::byte* scales, int64_t index) {
  switch (type) {
    case ScaleType::e8m0: {
      const auto exponent = static_cast<uint32_t>(scales[index]);
      // 2^-127 is subnormal.
      return std::bit_cast<float>(exponent == 0 ? uint32_t{1} << 22 : exponent << 23);
    }
    case ScaleType::e4m3:
      return value_of_e4m3(static_cast<uint8_t>(scales[index]));
    case ScaleType::float32:
      return reinterpret_cast<const float*>(scales)[index];
    case ScaleType::bfloat16:
      return widen(reinterpret_cast<const BFloat16*>(scales)[index]);
    default:
      return widen(reinterpret_cast<const Float16*>(scales)[index]);
  }
}

constexpr int64_t bytes_per_scale(ScaleType type) {
  if (type == ScaleType::e8m0 || type == ScaleType::e4m3) return 1;
  return type == ScaleType::float32 ? 4 : 2;
}

// With scales between these no value of a code becomes subnormal or infinite: values are between 2^-9 and 2^9.
constexpr float kSmallestScale = 0x1p-100F;
constexpr float kLargestScale = 0x1p100F;

}  // namespace maxmoe
