#include "ops/projection.h"

namespace maxmoe::ops {
namespace {

// Checks a parameter of the L experts: [L, sizes...].
void check_parameter(const Argument& parameter, const char* shape, std::initializer_list<Size> sizes,
                     const char* x_name, const Tensor& x) {
  parameter.has_dims(static_cast<int64_t>(sizes.size()), shape).has_dtype_of(x_name, x);
  int64_t dim = 0;
  for (const auto& [size, meaning] : sizes) parameter.has_size(dim++, size, meaning);
}

OptionalTensor transposed_matrices(const OptionalTensor& matrices) {
  return matrices.has_value() ? OptionalTensor(matrices->transpose(1, 2)) : std::nullopt;
}

}  // namespace

std::string Projection::schema(const std::string& name) {
  std::string text = "Tensor? " + name + "=None";
  for (const char* field : {"bias", "a", "b", "scales", "zeros"}) text += ", Tensor? " + name + "_" + field + "=None";
  return text + ", str? " + name + "_format=None, int " + name + "_columns=0, bool " + name + "_is_transposed=False";
}

Projection Projection::transposed() const {
  Projection result = *this;
  const Weights matrices = weights().transposed();
  result.tensor = matrices.tensor;
  result.is_transposed = matrices.is_transposed;
  result.bias = std::nullopt;
  result.a = transposed_matrices(b);
  result.b = transposed_matrices(a);
  return result;
}

Projection Projection::in_kernel_layout() const {
  if (!is_given()) return *this;
  Projection result = *this;
  const Weights matrices = weights().in_kernel_layout();
  result.tensor = matrices.tensor;
  result.scales = matrices.scales;
  result.zeros = matrices.zeros;
  if (bias.has_value()) result.bias = bias->contiguous();
  if (has_factors()) {
    result.a = gemm_operand(*a);
    result.b = gemm_operand(*b);
  }
  return result;
}

void check_projection(const char* op, const ProjectionNames& names, const Projection& p, const char* x_name,
                      const Tensor& x, const char* shape, Size count, Size in, Size out) {
  const Weights weights = p.weights();
  const Argument matrices(op, names.tensor, weights.tensor);
  check_weights(op, names.tensor, shape, weights);
  if (!weights.is_quantized()) {
    check_parameter(matrices, shape, {count, in, out}, x_name, x);
  } else {
    matrices.has_size(0, count.size, count.meaning);
    MAXMOE_CHECK(weights.in_size() == in.size && weights.out_size() == out.size, op, names.tensor,
                 " must have matrices of ", in.size, " (", in.meaning, ") x ", out.size, " (", out.meaning, "), got ",
                 weights.in_size(), " x ", weights.out_size());
  }
  if (p.bias.has_value()) {
    check_parameter(Argument(op, names.bias, *p.bias), "[L, F], one for each column", {count, out}, x_name, x);
  }
  MAXMOE_CHECK(p.a.has_value() == p.b.has_value(), op, p.a.has_value() ? names.b : names.a, " must be given with ",
               p.a.has_value() ? names.a : names.b, ", got None");
  if (!p.has_factors()) return;
  // rank() reads the last of three dims.
  const Argument factor(op, names.a, *p.a);
  factor.has_dims(3, "[L, in, r]");
  check_parameter(factor, "[L, in, r]", {count, in, {p.rank(), "r"}}, x_name, x);
  check_parameter(Argument(op, names.b, *p.b), "[L, r, out]", {count, {p.rank(), "r of the other factor"}, out}, x_name,
                  x);
}

void check_no_projection(const char* op, const ProjectionNames& names, const Projection& p) {
  for (const auto& [name, tensor] : {std::pair(names.bias, p.bias), std::pair(names.a, p.a), std::pair(names.b, p.b)}) {
    MAXMOE_CHECK(!tensor.has_value(), op, name, " must be None without ", names.tensor, ", got shape ",
                 tensor->sizes());
  }
}

}  // namespace maxmoe::ops
