// Quantized stacks as tensors.
#include <ATen/TensorOperators.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>

#include <algorithm>

#include "kernels/quantized/dequantize.h"
#include "ops/backend.h"
#include "ops/memory.h"
#include "ops/operators.h"
#include "ops/registration.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kDequantize = "dequantize";

// The numbers that codes stand for, in float32 [L, rows, columns], without zero points.
Tensor looked_up(const QuantizedMatrix& m, const Tensor& codes, const Tensor& table) {
  if (m.codes->type != ByteType::none) {
    const auto type = m.codes->type == ByteType::int8 ? at::kChar : at::kFloat8_e4m3fn;
    return codes.contiguous().view(type).to(at::kFloat);
  }
  const Tensor low = codes.bitwise_and(0x0f);
  const Tensor high = codes.bitwise_right_shift(4);
  const bool is_high_first = m.codes->is_high_first;
  const Tensor all = at::stack({is_high_first ? high : low, is_high_first ? low : high}, -1).flatten(2);
  const Tensor index = all.narrow(2, 0, m.columns).to(at::kInt);
  return table.index_select(0, index.view(-1)).view(index.sizes());
}

// Scales or zero points, one for each element: [L, rows, columns].
Tensor of_elements(const Tensor& blocks, const QuantizedMatrix& m) {
  const int64_t rows = int64_t{1} << m.log2_rows_per_scale;
  const int64_t columns = int64_t{1} << std::min(m.log2_columns_per_scale, 30);
  const Tensor rows_repeated = blocks.repeat_interleave(rows, 1).narrow(1, 0, m.rows);
  // A single scale per row is broadcast over the columns.
  if (blocks.size(2) == 1) return rows_repeated;
  return rows_repeated.repeat_interleave(columns, 2).narrow(2, 0, m.columns);
}

// The scales of blocks in float32; with scales of rows, their products.
Tensor scales_of(const Weights& w, ScaleType type) {
  if (type == ScaleType::e8m0) return (w.scales->to(at::kFloat) - 127).exp2();
  const Tensor scales = type == ScaleType::e4m3 ? w.scales->contiguous().view(at::kFloat8_e4m3fn) : *w.scales;
  return w.row_scales.has_value() ? scales.to(at::kFloat) * *w.row_scales : scales.to(at::kFloat);
}

}  // namespace

Tensor values_of_codes(const Weights& w) {
  if (!w.is_quantized()) return {};
  const QuantizedMatrix m = quantized_view(w).first;
  if (m.codes->type != ByteType::none) return {};
  const Tensor values = at::empty({16}, w.tensor->options().dtype(at::kFloat));
  for (int64_t code = 0; code < 16; ++code) values.select(0, code).fill_(m.values().values[static_cast<size_t>(code)]);
  return values;
}

Tensor dequantize_aten(const Weights& w, at::ScalarType dtype, const Tensor& values) {
  const QuantizedMatrix m = quantized_view(w).first;
  Tensor numbers = looked_up(m, *w.tensor, values);
  if (w.zeros.has_value()) numbers = numbers - of_elements(w.zeros->to(at::kFloat), m);
  return (numbers * of_elements(scales_of(w, m.scale_type), m)).to(dtype);
}

namespace {

Tensor dequantize_backend(const Tensor& codes, const Tensor& scales, const OptionalTensor& zeros,
                          const OptionalTensor& row_scales, std::string_view format, int64_t columns,
                          at::ScalarType dtype) {
  const Weights given{codes, scales, zeros, row_scales, format, columns};
  check_weights(kDequantize, "codes", "", given);
  check_floating(kDequantize, "dtype", dtype);
  if (!uses_kernels(codes)) return dequantize_aten(given, dtype, values_of_codes(given));
  const Weights w = given.in_kernel_layout();
  const Tensor out = empty({codes.size(0), codes.size(1), columns}, codes.options().dtype(dtype));
  if (out.numel() == 0) return out;
  for_dtype(dtype, [&]<class T>() {
    maxmoe::dequantize(Dequantize<T>{quantized_view(w), pointer<T>(out)}, torch_executor());
  });
  return out;
}

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<dequantize, dequantize_backend>(
      library,
      "dequantize(Tensor codes, Tensor scales, Tensor? zeros, Tensor? row_scales, str format, int columns, "
      "ScalarType dtype) -> Tensor");
}

}  // namespace
}  // namespace maxmoe::ops
