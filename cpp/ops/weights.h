// Stacks of matrices that are operands of operators: tensors of the dtype of x, or quantized.
#pragma once

#include <string_view>

#include "kernels/product/gemm.h"
#include "ops/checks.h"
#include "ops/views.h"

namespace maxmoe::ops {

// A stack of matrices [L, in, out]. A quantized one has codes [L, rows, bytes], scales, maybe zero points and maybe
// scales of rows [L, rows, 1], and is read as the stack [L, rows, columns] or, if it is transposed, [L, columns, rows].
// maxmoe.quantization describes the formats.
struct Weights {
  OptionalTensor tensor = {};  // [L, in, out], or the codes; none without matrices
  OptionalTensor scales = {};
  OptionalTensor zeros = {};
  OptionalTensor row_scales = {};
  std::optional<std::string_view> format = {};  // none for a tensor
  int64_t columns = 0;                          // number of codes per row
  bool is_transposed = false;

  bool is_given() const { return tensor.has_value(); }
  bool is_quantized() const { return format.has_value(); }
  int64_t count() const { return tensor->size(0); }
  int64_t in_size() const { return is_quantized() && is_transposed ? columns : tensor->size(1); }
  int64_t out_size() const {
    if (!is_quantized()) return tensor->size(2);
    return is_transposed ? tensor->size(1) : columns;
  }
  Weights transposed() const;
  // The stack as a tensor [L, in, out].
  Tensor dequantized(at::ScalarType dtype) const;
  // A stack of one of the matrices.
  Weights matrix(int64_t index) const;
  // The stack in a layout that kernels read. It owns the memory of a view of it.
  Weights in_kernel_layout() const;
};

// Checks the dims and dtypes of a stack, and that the parts of a quantized one fit together; `name` names the
// argument with the codes, and <name>_scales and so on the other arguments. Sizes are left to the caller.
void check_weights(const char* op, const char* name, const char* shape, const Weights& weights);

// Raises if scales of the argument `name` require a gradient or have a tangent. Sizes, which may be symbolic, are not
// read.
void check_is_frozen(const char* op, const char* name, const Weights& weights);

// A view of a quantized stack that in_kernel_layout returned.
QuantizedStack quantized_view(const Weights& weights);

// The values [16] of codes of 4 bits, on the device of the codes; undefined for other formats and for a tensor. The
// values reach the device as arguments of kernels, because a copy from the host would wait for the device.
Tensor values_of_codes(const Weights& weights);

// The operator dequantize through ATen. [L, rows, columns]
Tensor dequantize_aten(const Weights& weights, at::ScalarType dtype, const Tensor& values);

template <class T>
WeightStack<T> weight_view(const Weights& weights) {
  if (weights.is_quantized()) return WeightStack<T>(quantized_view(weights));
  return const_stack<T>(*weights.tensor);
}

}  // namespace maxmoe::ops
