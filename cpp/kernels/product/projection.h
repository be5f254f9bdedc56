// One matrix of each expert, with the bias and the low-rank term of its product.
#pragma once

#include "kernels/product/gemm.h"

namespace maxmoe {

// Low-rank factors beside a stack of matrices W [L, in, out]: rows x are multiplied with W + a b, as x W + (x a) b. The
// sum W + a b is not computed. The rows x a are called the reduced rows.
template <class T>
struct LowRankFactors {
  ConstMatrixStack<T> a;  // [L, in, r]; empty without factors
  ConstMatrixStack<T> b;  // [L, r, out]

  MAXMOE_INLINE bool empty() const { return a.empty(); }
  MAXMOE_INLINE int64_t rank() const { return a.first.columns; }
};

// A row x of expert g becomes x (W[g] + a[g] b[g]) + bias[g].
template <class T>
struct Projection {
  WeightStack<T> weights;        // W [L, in, out]; empty if the experts have no such matrix
  ConstMatrixView<T> bias = {};  // [L, out] or empty
  LowRankFactors<T> factors = {};

  MAXMOE_INLINE bool empty() const { return weights.empty(); }
  MAXMOE_INLINE int64_t rows() const { return weights.rows(); }
  MAXMOE_INLINE int64_t columns() const { return weights.columns(); }
  MAXMOE_INLINE bool has_bias() const { return bias.data != nullptr; }
};

}  // namespace maxmoe
