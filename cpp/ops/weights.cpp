#include "ops/weights.h"

#include <array>
#include <bit>
#include <span>
#include <string>

#include "kernels/quantized/formats.h"
#include "ops/autograd.h"
#include "ops/operators.h"

namespace maxmoe::ops {
namespace {

struct Format {
  const Codes* codes;
  std::span<const ScaleType> scale_types;
  int64_t rows_per_scale;
  int64_t columns_per_scale;  // as in NamedFormat
  bool has_row_scales;
};

constexpr int64_t kSmallestGroup = 32;
static_assert(kSmallestGroup >= kMinColumnsPerScale);

constexpr auto kFormats = [] {
  std::array<std::pair<const char*, Format>, Formats::kNumNames> all;
  size_t i = 0;
  Formats::with_each([&]<class F> {
    for (const NamedFormat& named : F::kNames) {
      all[i++] = {named.name,
                  {&F::kCodes, F::Scales::kAll, named.rows_per_scale, named.columns_per_scale, named.has_row_scales}};
    }
  });
  return all;
}();

// The dtypes of scales, in the order of ScaleType.
constexpr std::pair<at::ScalarType, const char*> kScaleDtypes[] = {{at::kByte, "uint8"},
                                                                   {at::kByte, "uint8"},
                                                                   {at::kFloat, "float32"},
                                                                   {at::kBFloat16, "bfloat16"},
                                                                   {at::kHalf, "float16"}};

// Without an overflow for any size: `columns` may be any number.
int64_t blocks_of(int64_t size, int64_t block) {
  return size / block + (size % block > 0 ? 1 : 0);
}

// The number of columns that share a scale, a power of two: the smallest one that gives `scales_per_row` scales. Other
// numbers of columns have failed an earlier check.
int64_t columns_per_scale(const Format& format, int64_t columns, int64_t scales_per_row) {
  if (format.columns_per_scale > 0) return format.columns_per_scale;
  int64_t block = kSmallestGroup;
  while (blocks_of(columns, block) > scales_per_row) block *= 2;
  return block;
}

// The type of scales of a dtype; none if the format has no such scales.
std::optional<ScaleType> scale_type(const Format& format, at::ScalarType dtype) {
  for (const ScaleType type : format.scale_types) {
    if (kScaleDtypes[static_cast<size_t>(type)].first == dtype) return type;
  }
  return std::nullopt;
}

// "float32, bfloat16 or float16"
std::string scale_dtypes(const Format& format) {
  std::string names;
  for (const ScaleType& type : format.scale_types) {
    if (!names.empty()) names += &type == &format.scale_types.back() ? " or " : ", ";
    names += kScaleDtypes[static_cast<size_t>(type)].second;
  }
  return names;
}

// The names of the arguments begin with `prefix`.
void check_scales(const char* op, const std::string& prefix, const Format& format, const Weights& w) {
  const Tensor& scales = *w.scales;
  MAXMOE_CHECK(scale_type(format, scales.scalar_type()).has_value(), op, prefix, "scales must be ",
               scale_dtypes(format), " for the format ", *w.format, ", got ", scales.scalar_type());
  const int64_t rows = blocks_of(w.tensor->size(1), format.rows_per_scale);
  int64_t columns = w.columns > 0 ? 1 : 0;
  if (format.columns_per_scale > 0) columns = blocks_of(w.columns, format.columns_per_scale);
  if (format.columns_per_scale == kAnyGroup && scales.dim() == 3 && scales.size(2) > 0) {
    columns = blocks_of(w.columns, columns_per_scale(format, w.columns, scales.size(2)));
  }
  MAXMOE_CHECK(scales.dim() == 3 && scales.size(0) == w.count() && scales.size(1) == rows && scales.size(2) == columns,
               op, prefix, "scales must have shape [", w.count(), ", ", rows, ", ", columns, "] for the format ",
               *w.format, " of ", w.tensor->size(1), " x ", w.columns, " matrices, got ", scales.sizes());
  if (!format.has_row_scales) {
    MAXMOE_CHECK(!w.row_scales.has_value(), op, prefix, "row_scales must be None with the format ", *w.format,
                 ", got shape ", w.row_scales->sizes());
    return;
  }
  MAXMOE_CHECK(w.row_scales.has_value(), op, prefix, "row_scales must be given with the format ", *w.format,
               ", got None");
  const Tensor& of_rows = *w.row_scales;
  MAXMOE_CHECK(of_rows.scalar_type() == at::kFloat && of_rows.sizes() == at::IntArrayRef({w.count(), rows, 1}), op,
               prefix, "row_scales must be float32 of shape [", w.count(), ", ", rows, ", 1], got ",
               of_rows.scalar_type(), " of shape ", of_rows.sizes());
}

}  // namespace

Weights Weights::transposed() const {
  Weights result = *this;
  if (is_quantized()) {
    result.is_transposed = !is_transposed;
  } else {
    result.tensor = tensor->transpose(1, 2);
  }
  return result;
}

Tensor Weights::dequantized(at::ScalarType dtype) const {
  if (!is_quantized()) return *tensor;
  const Tensor matrices = dequantize(*tensor, *scales, zeros, row_scales, *format, columns, dtype);
  return is_transposed ? matrices.transpose(1, 2) : matrices;
}

Weights Weights::matrix(int64_t index) const {
  Weights one = *this;
  for (OptionalTensor* part : {&one.tensor, &one.scales, &one.zeros, &one.row_scales}) {
    if (part->has_value()) *part = (*part)->narrow(0, index, 1);
  }
  return one;
}

Weights Weights::in_kernel_layout() const {
  Weights result = *this;
  if (!is_quantized()) {
    result.tensor = gemm_operand(*tensor);
    return result;
  }
  if (tensor->size(2) > 1 && tensor->stride(2) != 1) result.tensor = tensor->contiguous();
  result.scales = scales->contiguous();
  if (zeros.has_value()) result.zeros = zeros->contiguous();
  if (row_scales.has_value()) result.row_scales = row_scales->contiguous();
  return result;
}

void check_weights(const char* op, const char* name, const char* shape, const Weights& w) {
  const std::string argument(name);
  // The operator dequantize has the arguments codes, scales and so on, others rhs, rhs_scales and so on.
  const std::string prefix = argument == "codes" ? "" : argument + "_";
  if (!w.is_quantized()) {
    Argument(op, name, *w.tensor).has_dims(3, shape);
    for (const auto& [part, given] :
         {std::pair("scales", w.scales), std::pair("zeros", w.zeros), std::pair("row_scales", w.row_scales)}) {
      MAXMOE_CHECK(!given.has_value(), op, prefix, part, " must be None without ", prefix, "format, got shape ",
                   given->sizes());
    }
    return;
  }
  const auto format = parse<Format>(op, prefix + "format", *w.format, kFormats);
  Argument(op, name, *w.tensor).has_dims(3, "[L, rows, bytes]");
  MAXMOE_CHECK(w.tensor->scalar_type() == at::kByte, op, argument, " must be uint8 with the format ", *w.format,
               ", got ", w.tensor->scalar_type());
  const int64_t bytes = blocks_of(w.columns, 8 / format.codes->bits);
  MAXMOE_CHECK(w.columns >= 0 && w.tensor->size(2) == bytes, op, argument, " must have ", bytes, " bytes per row for ",
               w.columns, " columns in the format ", *w.format, ", got shape ", w.tensor->sizes());
  MAXMOE_CHECK(w.scales.has_value(), op, prefix, "scales must be given with the format ", *w.format, ", got None");
  check_scales(op, prefix, format, w);
  if (!w.zeros.has_value()) return;
  MAXMOE_CHECK(format.codes->values_with_zeros != nullptr, op, prefix, "zeros must be None with the format ", *w.format,
               ", got shape ", w.zeros->sizes());
  MAXMOE_CHECK(w.zeros->scalar_type() == at::kByte && w.zeros->sizes() == w.scales->sizes(), op, prefix,
               "zeros must be uint8 of the shape of the scales, ", w.scales->sizes(), ", got ", w.zeros->scalar_type(),
               " of shape ", w.zeros->sizes());
}

void check_is_frozen(const char* op, const char* name, const Weights& w) {
  for (const auto& [part, scales] : {std::pair("_scales", w.scales), std::pair("_row_scales", w.row_scales)}) {
    MAXMOE_CHECK(!requires_grad(scales) && !has_tangent(scales), op, name, part,
                 " must not require a gradient: quantized weights are frozen, got scales that do");
  }
}

QuantizedStack quantized_view(const Weights& w) {
  const auto format = parse<Format>("quantized_view", "format", *w.format, kFormats);  // check_weights has parsed it
  const Tensor& scales = *w.scales;
  QuantizedStack stack;
  // An empty stack has no memory. Its view must not look like the absence of one.
  static const uint8_t nothing = 0;
  QuantizedMatrix& m = stack.first;
  m.codes = format.codes;
  m.data = w.tensor->numel() > 0 ? const_pointer<uint8_t>(*w.tensor) : &nothing;
  m.row_bytes = w.tensor->stride(1);
  m.rows = w.tensor->size(1);
  m.columns = w.columns;
  m.scale_type = *scale_type(format, scales.scalar_type());
  m.scales = static_cast<const std::byte*>(scales.const_data_ptr());
  m.zeros = w.zeros.has_value() ? const_pointer<uint8_t>(*w.zeros) : nullptr;
  m.row_scales = w.row_scales.has_value() ? const_pointer<float>(*w.row_scales) : nullptr;
  m.scales_per_row = scales.size(2);
  const auto log2 = [](int64_t block) { return std::countr_zero(static_cast<uint64_t>(block)); };
  m.log2_rows_per_scale = log2(format.rows_per_scale);
  m.log2_columns_per_scale =
      format.columns_per_scale == kWholeRow ? 62 : log2(columns_per_scale(format, w.columns, scales.size(2)));
  stack.is_transposed = w.is_transposed;
  stack.count = w.count();
  stack.stride = w.tensor->stride(0);
  stack.scales_stride = scales.size(1) * scales.size(2);
  stack.row_scales_stride = m.rows;
  return stack;
}

}  // namespace maxmoe::ops
