#include "ops/projection.h"

namespace maxmoe::ops {
namespace {

OptionalTensor transposed_matrices(const OptionalTensor& matrices) {
  return matrices.has_value() ? OptionalTensor(matrices->transpose(1, 2)) : std::nullopt;
}

}  // namespace

std::string Projection::schema(const std::string& name) {
  const auto tensor = [&](const char* field) { return ", Tensor? " + name + field + "=None"; };
  return "Tensor? " + name + "=None" + tensor("_scales") + tensor("_zeros") + tensor("_row_scales") + ", str? " + name +
         "_format=None, int " + name + "_columns=0, bool " + name + "_is_transposed=False" + tensor("_bias") +
         tensor("_a") + tensor("_b");
}

Projection Projection::transposed() const {
  return {Weights::transposed(), std::nullopt, transposed_matrices(b), transposed_matrices(a)};
}

Projection Projection::in_kernel_layout() const {
  if (!is_given()) return *this;
  Projection result{Weights::in_kernel_layout(), bias, a, b};
  if (bias.has_value()) result.bias = bias->contiguous();
  if (has_factors()) {
    result.a = gemm_operand(*a);
    result.b = gemm_operand(*b);
  }
  return result;
}

void check_projection(const char* op, const ProjectionNames& names, const Projection& p, const char* x_name,
                      const Tensor& x, const char* shape, Size count, Size in, Size out) {
  const auto argument = [&](const char* name, const OptionalTensor& tensor) { return Argument(op, name, *tensor); };
  check_weights(op, names.tensor, shape, p);
  if (!p.is_quantized()) {
    argument(names.tensor, p.tensor).has_shape(shape, {count, in, out}).has_dtype_of(x_name, x);
  } else {
    argument(names.tensor, p.tensor).has_size(0, count.size, count.meaning);
    MAXMOE_CHECK(p.in_size() == in.size && p.out_size() == out.size, op, names.tensor, " must have matrices of ",
                 in.size, " (", in.meaning, ") x ", out.size, " (", out.meaning, "), got ", p.in_size(), " x ",
                 p.out_size());
  }
  if (p.bias.has_value()) {
    argument(names.bias, p.bias).has_shape("[L, F], one for each column", {count, out}).has_dtype_of(x_name, x);
  }
  MAXMOE_CHECK(p.a.has_value() == p.b.has_value(), op, p.a.has_value() ? names.b : names.a, " must be given with ",
               p.a.has_value() ? names.a : names.b, ", got None");
  if (!p.has_factors()) return;
  argument(names.a, p.a).has_dims(3, "[L, in, r]");  // rank() reads the last of three dims
  argument(names.a, p.a).has_shape("[L, in, r]", {count, in, {p.rank(), "r"}}).has_dtype_of(x_name, x);
  argument(names.b, p.b)
      .has_shape("[L, r, out]", {count, {p.rank(), "r of the other factor"}, out})
      .has_dtype_of(x_name, x);
}

void check_no_projection(const char* op, const ProjectionNames& names, const Projection& p) {
  for (const auto& [name, tensor] : {std::pair(names.bias, p.bias), std::pair(names.a, p.a), std::pair(names.b, p.b)}) {
    MAXMOE_CHECK(!tensor.has_value(), op, name, " must be None without ", names.tensor, ", got shape ",
                 tensor->sizes());
  }
}

}  // namespace maxmoe::ops
