// Turns tensors into the views of memory that kernels read and write.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <optional>

#include "kernels/matrix/dtype.h"
#include "kernels/matrix/matrix_view.h"

namespace maxmoe::ops {

// float32 for the 16-bit types, otherwise the type itself.
inline at::ScalarType accumulator_type(at::ScalarType type) {
  return type == at::kBFloat16 || type == at::kHalf ? at::kFloat : type;
}

// Calls body.operator()<T>() with the C++ type of a dtype. The dtype has passed check_floating.
template <class Body>
void for_dtype(at::ScalarType type, const Body& body) {
  switch (type) {
    case at::kDouble:
      return body.template operator()<double>();
    case at::kFloat:
      return body.template operator()<float>();
    case at::kBFloat16:
      return body.template operator()<BFloat16>();
    case at::kHalf:
      return body.template operator()<Float16>();
    default:
      TORCH_INTERNAL_ASSERT(false, "maxmoe: dtype ", type, " passed the checks");
  }
}

// The same for accumulator types alone.
template <class Body>
void for_accumulator_type(at::ScalarType type, const Body& body) {
  type == at::kDouble ? body.template operator()<double>() : body.template operator()<float>();
}

template <class T>
const T* const_pointer(const at::Tensor& tensor) {
  return static_cast<const T*>(tensor.const_data_ptr());
}

template <class T>
T* pointer(const at::Tensor& tensor) {
  return static_cast<T*>(tensor.mutable_data_ptr());
}

// The matrix if each of its rows is contiguous, otherwise a contiguous copy. Kernels that move rows read this layout.
inline at::Tensor contiguous_rows(const at::Tensor& matrix) {
  return matrix.size(1) <= 1 || matrix.stride(1) == 1 ? matrix : matrix.contiguous();
}

// The matrix, or stack of matrices, if it is row-major or transposed, otherwise a contiguous copy. Products read both
// layouts in place.
inline at::Tensor gemm_operand(const at::Tensor& tensor) {
  // torch calls a tensor without elements contiguous whatever its strides are, so contiguous() would not change them.
  if (tensor.numel() == 0) return at::empty(tensor.sizes(), tensor.options());
  const int64_t rows = tensor.size(-2);
  const int64_t columns = tensor.size(-1);
  const int64_t row_stride = tensor.stride(-2);
  const int64_t column_stride = tensor.stride(-1);
  const bool row_major = column_stride == 1 && row_stride >= columns;
  const bool column_major = row_stride == 1 && column_stride >= rows;
  return (row_major || column_major) && rows > 1 && columns > 1 ? tensor : tensor.contiguous();
}

// Whether the columns of a matrix, or of each matrix of a stack, are contiguous and the rows are not.
inline bool is_transposed(const at::Tensor& matrix) {
  return matrix.stride(-2) == 1 && matrix.stride(-1) != 1;
}

// A view of a matrix, or of the first matrix of a stack, that contiguous_rows or gemm_operand returned. Its strides say
// whether it is row-major or transposed.
template <class T>
ConstMatrixView<T> const_view(const at::Tensor& t) {
  const int64_t dims = t.dim();
  return {const_pointer<T>(t), t.size(dims - 2), t.size(dims - 1), t.stride(dims - 2),
          t.size(dims - 1) == 1 ? 1 : t.stride(dims - 1)};
}

// A view of an output, which the operator has allocated.
template <class T>
MatrixView<T> view(const at::Tensor& t) {
  const ConstMatrixView<T> as_const = const_view<T>(t);
  return {pointer<T>(t), as_const.rows, as_const.columns, as_const.row_stride, as_const.column_stride};
}

template <class T>
ConstMatrixStack<T> const_stack(const at::Tensor& t) {
  return {const_view<T>(t), t.size(0), t.stride(0)};
}

template <class T>
MatrixStack<T> stack(const at::Tensor& t) {
  return {view<T>(t), t.size(0), t.stride(0)};
}

// The tensor with another dtype. Tensor::to takes the way through the dispatcher also if the tensor has the dtype.
inline at::Tensor with_dtype(const at::Tensor& tensor, at::ScalarType type) {
  return tensor.scalar_type() == type ? tensor : tensor.to(type);
}

// The weights in the accumulator's type of `type`, the dtype of the rows, in which kernels read them: a list in memory.
inline std::optional<at::Tensor> accumulator_weights(const std::optional<at::Tensor>& weights, at::ScalarType type) {
  if (!weights.has_value()) return std::nullopt;
  return with_dtype(*weights, accumulator_type(type)).contiguous();
}

template <class T>
const T* const_pointer(const std::optional<at::Tensor>& tensor) {
  return tensor.has_value() ? const_pointer<T>(*tensor) : nullptr;
}

// Arguments of kernels in the layout that they read. An argument owns the memory and converts to what a kernel takes;
// as a temporary it lives until the kernel returns.

// A list; null for None.
struct List {
  std::optional<at::Tensor> tensor;

  explicit List(const std::optional<at::Tensor>& list)
      : tensor(list.has_value() ? std::optional(list->contiguous()) : std::nullopt) {}
  template <class T>
  operator const T*() const {  // NOLINT(google-explicit-constructor)
    return const_pointer<T>(tensor);
  }
};

// A matrix in the layout that a function returns.
template <at::Tensor (*in_layout)(const at::Tensor&)>
struct MatrixArgument {
  at::Tensor tensor;

  explicit MatrixArgument(const at::Tensor& matrix) : tensor(in_layout(matrix)) {}
  template <class T>
  operator MatrixView<const T>() const {  // NOLINT(google-explicit-constructor)
    return const_view<T>(tensor);
  }
};
using Rows = MatrixArgument<contiguous_rows>;
using Operand = MatrixArgument<gemm_operand>;  // of a product

}  // namespace maxmoe::ops
