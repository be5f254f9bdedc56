// The arguments of the operator gmm, and its product.
#pragma once

#include "ops/operators.h"

namespace maxmoe::ops {

inline constexpr const char* kGmm = "gmm";

struct GmmArguments {
  Tensor lhs;
  Tensor group_sizes;
  Projection rhs;
  int64_t group_offset = 0;

  template <class Self>
  static auto fields(Self& a) {
    return std::tuple_cat(std::tie(a.lhs, a.group_sizes), Projection::fields(a.rhs), std::tie(a.group_offset));
  }
};

// The first one checks everything but values of tensors.
void check_gmm_shapes(const GmmArguments& a);
void check_gmm(const GmmArguments& a);

// The product, for arguments that have been checked. With factors, `reduced` are the reduced rows.
Tensor multiply_grouped(const GmmArguments& a, const Tensor& reduced);

}  // namespace maxmoe::ops
