#include "ops/weights.h"

#include <bit>
#include <string>

#include "ops/autograd.h"
#include "ops/operators.h"

namespace maxmoe::ops {
namespace {

// A format: its codes and the shape of a block that shares a scale. kWholeRow: a block is a whole row; kAnyGroup: the
// number of columns follows from the number of scales.
struct Format {
  Codes codes;
  int64_t rows_per_scale;
  int64_t columns_per_scale;
};

constexpr int64_t kWholeRow = 0;
constexpr int64_t kAnyGroup = -1;
constexpr int64_t kSmallestGroup = 32;
static_assert(kSmallestGroup >= kMinColumnsPerScale);

constexpr std::pair<const char*, Format> kFormats[] = {
    {"mxfp4", {Codes::e2m1, 1, 32}},          {"nf4", {Codes::nf4, 1, 64}},
    {"int4", {Codes::int4, 1, kAnyGroup}},    {"int8", {Codes::int8, 1, kWholeRow}},
    {"fp8_row", {Codes::e4m3, 1, kWholeRow}}, {"fp8_block", {Codes::e4m3, 128, 128}},
};

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

ScaleType scale_type(at::ScalarType type) {
  switch (type) {
    case at::kByte:
      return ScaleType::e8m0;
    case at::kFloat:
      return ScaleType::float32;
    case at::kBFloat16:
      return ScaleType::bfloat16;
    default:
      return ScaleType::float16;
  }
}

// The names of the arguments begin with `prefix`.
void check_scales(const char* op, const std::string& prefix, const Format& format, const Weights& w) {
  const Tensor& scales = *w.scales;
  const bool is_exponent = format.codes == Codes::e2m1;
  const auto type = scales.scalar_type();
  const bool is_legal =
      is_exponent ? type == at::kByte : type == at::kFloat || type == at::kBFloat16 || type == at::kHalf;
  MAXMOE_CHECK(is_legal, op, prefix, "scales must be ", is_exponent ? "uint8" : "float32, bfloat16 or float16",
               " for the format ", *w.format, ", got ", type);
  const int64_t rows = blocks_of(w.tensor->size(1), format.rows_per_scale);
  int64_t columns = w.columns > 0 ? 1 : 0;
  if (format.columns_per_scale > 0) columns = blocks_of(w.columns, format.columns_per_scale);
  if (format.columns_per_scale == kAnyGroup && scales.dim() == 3 && scales.size(2) > 0) {
    columns = blocks_of(w.columns, columns_per_scale(format, w.columns, scales.size(2)));
  }
  MAXMOE_CHECK(scales.dim() == 3 && scales.size(0) == w.count() && scales.size(1) == rows && scales.size(2) == columns,
               op, prefix, "scales must have shape [", w.count(), ", ", rows, ", ", columns, "] for the format ",
               *w.format, " of ", w.tensor->size(1), " x ", w.columns, " matrices, got ", scales.sizes());
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
  const Tensor matrices = dequantize(*tensor, *scales, zeros, *format, columns, dtype);
  return is_transposed ? matrices.transpose(1, 2) : matrices;
}

Weights Weights::matrix(int64_t index) const {
  Weights one = *this;
  for (OptionalTensor* part : {&one.tensor, &one.scales, &one.zeros}) {
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
  return result;
}

void check_weights(const char* op, const char* name, const char* shape, const Weights& w) {
  const std::string argument(name);
  // The operator dequantize has the arguments codes, scales and so on, others rhs, rhs_scales and so on.
  const std::string prefix = argument == "codes" ? "" : argument + "_";
  if (!w.is_quantized()) {
    Argument(op, name, *w.tensor).has_dims(3, shape);
    MAXMOE_CHECK(!w.scales.has_value() && !w.zeros.has_value(), op, prefix, w.scales.has_value() ? "scales" : "zeros",
                 " must be None without ", prefix, "format, got shape ",
                 (w.scales.has_value() ? w.scales : w.zeros)->sizes());
    return;
  }
  const auto format = parse<Format>(op, prefix + "format", *w.format, kFormats);
  Argument(op, name, *w.tensor).has_dims(3, "[L, rows, bytes]");
  MAXMOE_CHECK(w.tensor->scalar_type() == at::kByte, op, argument, " must be uint8 with the format ", *w.format,
               ", got ", w.tensor->scalar_type());
  const int64_t bytes = blocks_of(w.columns, 8 / bits_per_code(format.codes));
  MAXMOE_CHECK(w.columns >= 0 && w.tensor->size(2) == bytes, op, argument, " must have ", bytes, " bytes per row for ",
               w.columns, " columns in the format ", *w.format, ", got shape ", w.tensor->sizes());
  MAXMOE_CHECK(w.scales.has_value(), op, prefix, "scales must be given with the format ", *w.format, ", got None");
  check_scales(op, prefix, format, w);
  if (!w.zeros.has_value()) return;
  MAXMOE_CHECK(format.codes == Codes::int4, op, prefix, "zeros must be None with the format ", *w.format,
               ", got shape ", w.zeros->sizes());
  MAXMOE_CHECK(w.zeros->scalar_type() == at::kByte && w.zeros->sizes() == w.scales->sizes(), op, prefix,
               "zeros must be uint8 of the shape of the scales, ", w.scales->sizes(), ", got ", w.zeros->scalar_type(),
               " of shape ", w.zeros->sizes());
}

void check_is_frozen(const char* op, const char* name, const OptionalTensor& scales) {
  MAXMOE_CHECK(!requires_grad(scales) && !has_tangent(scales), op, name,
               "_scales must not require a gradient: quantized weights are frozen, got scales that do");
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
  m.scale_type = scale_type(scales.scalar_type());
  m.scales = static_cast<const std::byte*>(scales.const_data_ptr());
  m.zeros = w.zeros.has_value() ? const_pointer<uint8_t>(*w.zeros) : nullptr;
  m.scales_per_row = scales.size(2);
  const auto log2 = [](int64_t block) { return std::countr_zero(static_cast<uint64_t>(block)); };
  m.log2_rows_per_scale = log2(format.rows_per_scale);
  m.log2_columns_per_scale =
      format.columns_per_scale == kWholeRow ? 62 : log2(columns_per_scale(format, w.columns, scales.size(2)));
  stack.is_transposed = w.is_transposed;
  stack.count = w.count();
  stack.stride = w.tensor->stride(0);
  stack.scales_stride = scales.size(1) * scales.size(2);
  return stack;
}

}  // namespace maxmoe::ops
