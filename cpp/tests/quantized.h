// Random quantized matrices that own their memory, and the definition of their elements, for tests.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "kernels/quantized/formats.h"
#include "kernels/quantized/quantized_matrix.h"
#include "matrix.h"
#include "random.h"

namespace maxmoe {

// A format: codes, the type of the scales, and the rows and columns of a block as powers of two.
struct QuantizedFormat {
  const Codes* codes;
  ScaleType scale_type;
  int log2_rows;
  int log2_columns;
  bool has_zeros = false;
};

constexpr int kLog2WholeRow = 62;
inline const std::vector<QuantizedFormat> kQuantizedFormats = {
    {&Mxfp4::kCodes, ScaleType::e8m0, 0, 5, false},
    {&Nf4::kCodes, ScaleType::float32, 0, 6, false},
    {&Int4::kCodes, ScaleType::bfloat16, 0, 5, false},
    {&Int4::kCodes, ScaleType::float16, 0, 6, true},
    {&Int4::kCodes, ScaleType::float32, 0, 7, true},
    {&Int4::kCodes, ScaleType::float32, 0, 8, false},
    {&Int8::kCodes, ScaleType::float32, 0, kLog2WholeRow, false},
    {&Int8::kCodes, ScaleType::float16, 0, kLog2WholeRow, false},
    {&Fp8::kCodes, ScaleType::bfloat16, 0, kLog2WholeRow, false},
    {&Fp8::kCodes, ScaleType::float32, 7, 7, false},
    {&Nvfp4::kCodes, ScaleType::e4m3, 0, 4, false},
    // Other formats with blocks of 16 columns.
    {&Mxfp4::kCodes, ScaleType::e8m0, 0, 4, false},
    {&Nf4::kCodes, ScaleType::bfloat16, 0, 4, false}};

// A format in the messages of tests.
inline std::string text(const QuantizedFormat& format) {
  std::string name;
  Formats::with(format.codes, [&]<class Format> { name = Format::kNames[0].name; });
  return name + ", scale type " + std::to_string(static_cast<int>(format.scale_type));
}

// Whether all scales are between 1/256 and 1; otherwise some are zero, subnormal, the smallest normal or the largest
// numbers.
enum class Scales { moderate, any };

class QuantizedTestMatrix {
 public:
  // All bytes are random, also the unused half of the last byte of a row and the gap after it. A format with E4M3 has
  // NaN codes if `has_nan`.
  QuantizedTestMatrix(const QuantizedFormat& format, int64_t rows, int64_t columns, Scales scales, unsigned seed,
                      bool has_nan = false)
      : format_(format), rows_(rows), columns_(columns), random_(seed) {
    for (int code = 0; code < 256; ++code) values_[static_cast<size_t>(code)] = value_of(static_cast<uint8_t>(code));
    row_bytes_ = (columns * format.codes->bits + 7) / 8 + kGap;
    for (int64_t i = 0; i < rows * row_bytes_; ++i) codes_.push_back(random_code(has_nan));
    scales_per_row_ = columns == 0 ? 0 : ((columns - 1) >> format.log2_columns) + 1;
    const int64_t rows_of_scales = rows == 0 ? 0 : ((rows - 1) >> format.log2_rows) + 1;
    for (int64_t i = 0; i < rows_of_scales * scales_per_row_; ++i) {
      push_scale(scales);
      zeros_.push_back(static_cast<uint8_t>(random_.below(16)));
    }
    scales_.resize(scales_.size() + 1);  // without scales the pointer must not be null either
    for (int64_t row = 0; row <= rows; ++row) row_scales_.push_back(random_row_scale(scales));
  }

  QuantizedMatrix view() const {
    QuantizedMatrix m;
    m.codes = format_.codes;
    m.data = codes_.data();
    m.row_bytes = row_bytes_;
    m.rows = rows_;
    m.columns = columns_;
    m.scale_type = format_.scale_type;
    m.scales = scales_.data();
    m.zeros = format_.has_zeros ? zeros_.data() : nullptr;
    m.row_scales = has_row_scales() ? row_scales_.data() : nullptr;
    m.scales_per_row = scales_per_row_;
    m.log2_rows_per_scale = format_.log2_rows;
    m.log2_columns_per_scale = format_.log2_columns;
    return m;
  }

  // An element by definition: one product in float, with a scale that may be another one.
  float element(int64_t row, int64_t column) const {
    const int64_t block = (row >> format_.log2_rows) * scales_per_row_ + (column >> format_.log2_columns);
    float value = values_[code(row, column)];
    if (format_.codes == &Int4::kCodes) value -= format_.has_zeros ? zeros_[static_cast<size_t>(block)] : 8.0F;
    return value * (has_row_scales() ? scale(block) * row_scales_[static_cast<size_t>(row)] : scale(block));
  }

  template <class T>
  Matrix<T> dequantized() const {
    Matrix<T> result(rows_, columns_);
    for (int64_t r = 0; r < rows_; ++r) {
      for (int64_t c = 0; c < columns_; ++c) {
        result.element(r, c) = narrow<T>(static_cast<Accumulator<T>>(element(r, c)));
      }
    }
    return result;
  }

  uint8_t code(int64_t row, int64_t column) const {
    const int64_t bits = format_.codes->bits;
    const uint8_t byte = codes_[static_cast<size_t>(row * row_bytes_ + column * bits / 8)];
    if (bits == 8) return byte;
    const bool is_high = (column % 2 == 0) == (format_.codes == &Nf4::kCodes);
    return is_high ? byte >> 4 : byte & 15;
  }

 private:
  static constexpr int64_t kGap = 5;

  uint8_t random_code(bool has_nan) {
    const auto byte = static_cast<uint8_t>(random_.bits());
    return format_.codes == &Fp8::kCodes && byte % 128 == 127 && !has_nan ? byte - 1 : byte;
  }

  void push_scale(Scales scales) {
    if (format_.scale_type == ScaleType::e8m0) {
      constexpr uint8_t kEdges[] = {0, 1, 2, 3, 26, 27, 127, 128, 253, 254};
      push(scales == Scales::any ? kEdges[random_.below(10)] : static_cast<uint8_t>(119 + random_.below(9)));
      return;
    }
    if (format_.scale_type == ScaleType::e4m3) {
      const auto byte = static_cast<uint8_t>(random_.bits());
      push(scales == Scales::any && byte % 128 != 127 ? byte : static_cast<uint8_t>(8 + byte % 48));
      return;
    }
    constexpr float kEdges[] = {0.0F,      0x1p-149F, 0x1p-133F, 0x1p-127F, 0x1p-126F,
                                0x1p-101F, 0x1p-100F, -0.5F,     1.0F,      3e38F};
    float scale = static_cast<float>(random_.uniform(1.0 / 256, 1.0));
    if (scales == Scales::any) scale = kEdges[random_.below(format_.scale_type == ScaleType::float16 ? 9 : 10)];
    if (format_.scale_type == ScaleType::float32) {
      push(scale);
    } else if (format_.scale_type == ScaleType::bfloat16) {
      push(narrow<BFloat16>(scale));
    } else {
      push(narrow<Float16>(scale));
    }
  }

  bool has_row_scales() const { return format_.scale_type == ScaleType::e4m3; }

  float random_row_scale(Scales scales) {
    constexpr float kEdges[] = {0.0F, 0x1p-149F, 0x1p-133F, 0x1p-127F, 0x1p-126F, 0x1p-101F, -0.3F, 1.0F, 0x1p118F};
    return scales == Scales::any ? kEdges[random_.below(9)] : static_cast<float>(random_.uniform(0.1, 1.0));
  }

  template <class Scale>
  void push(Scale scale) {
    const auto* bytes = reinterpret_cast<const std::byte*>(&scale);
    scales_.insert(scales_.end(), bytes, bytes + sizeof(scale));
  }

  float scale(int64_t block) const {
    const std::byte* memory = scales_.data();
    switch (format_.scale_type) {
      case ScaleType::e8m0:
        return static_cast<float>(std::ldexp(1.0, static_cast<int>(memory[block]) - 127));
      case ScaleType::e4m3:
        return small_float(static_cast<int>(memory[block]), 4, 3);
      case ScaleType::float32:
        return load<float>(block);
      case ScaleType::bfloat16:
        return widen(load<BFloat16>(block));
      default:
        return widen(load<Float16>(block));
    }
  }

  template <class Scale>
  Scale load(int64_t block) const {
    Scale scale;
    std::memcpy(&scale, scales_.data() + block * static_cast<int64_t>(sizeof(Scale)), sizeof(Scale));
    return scale;
  }

  // A float of `exponent_bits` and `mantissa_bits`, without infinities.
  static float small_float(int code, int exponent_bits, int mantissa_bits) {
    const int exponent = (code >> mantissa_bits) % (1 << exponent_bits);
    const double fraction = std::ldexp(code % (1 << mantissa_bits), -mantissa_bits) + (exponent > 0 ? 1 : 0);
    const int bias = (1 << (exponent_bits - 1)) - 1;
    const double magnitude = std::ldexp(fraction, std::max(exponent, 1) - bias);
    return static_cast<float>((code >> (exponent_bits + mantissa_bits)) != 0 ? -magnitude : magnitude);
  }

  float value_of(uint8_t code) const {
    constexpr float kQuantiles[] = {-1.0F,
                                    -0.6961928009986877F,
                                    -0.5250730514526367F,
                                    -0.39491748809814453F,
                                    -0.28444138169288635F,
                                    -0.18477343022823334F,
                                    -0.09105003625154495F,
                                    0.0F,
                                    0.07958029955625534F,
                                    0.16093020141124725F,
                                    0.24611230194568634F,
                                    0.33791524171829224F,
                                    0.44070982933044434F,
                                    0.5626170039176941F,
                                    0.7229568362236023F,
                                    1.0F};
    if (format_.codes == &Mxfp4::kCodes || format_.codes == &Nvfp4::kCodes) return small_float(code, 2, 1);
    if (format_.codes == &Nf4::kCodes) return kQuantiles[code % 16];
    if (format_.codes == &Int4::kCodes) return code;
    if (format_.codes == &Int8::kCodes) return static_cast<int8_t>(code);
    return code % 128 == 127 ? std::numeric_limits<float>::quiet_NaN() : small_float(code, 4, 3);
  }

  QuantizedFormat format_;
  int64_t rows_;
  int64_t columns_;
  int64_t row_bytes_;
  int64_t scales_per_row_;
  std::array<float, 256> values_;  // the value of each code
  Random random_;
  std::vector<uint8_t> codes_;
  std::vector<std::byte> scales_;
  std::vector<uint8_t> zeros_;
  std::vector<float> row_scales_;
};

// Whether two numbers are the same bit by bit, where NaN is NaN.
template <class T>
bool is_same_number(T left, T right) {
  return (std::isnan(widen(left)) && std::isnan(widen(right))) || std::memcmp(&left, &right, sizeof(T)) == 0;
}

template <class T>
void expect_same_numbers(const Matrix<T>& got, const Matrix<T>& want) {
  for (int64_t r = 0; r < want.rows(); ++r) {
    for (int64_t c = 0; c < want.columns(); ++c) {
      if (is_same_number(got.view().row(r)[c], want.view().row(r)[c])) continue;
      FAIL() << got(r, c) << " instead of " << want(r, c) << " at row " << r << ", column " << c;
    }
  }
}

}  // namespace maxmoe
