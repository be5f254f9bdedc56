// The steps of expert_ffn and its backward pass through ATen.
#pragma once

#include "ops/expert_ffn/expert_ffn.h"
#include "ops/grouped_mm.h"
#include "ops/row_sums.h"

namespace maxmoe::ops {

// The plan, and the steps that read it. Differentiable steps call operators of this library, which write zeros to the
// rows past the last group. The other steps call ATen directly and leave these rows undefined, because no result
// depends on them. On a device, the operators would launch more kernels, because they read the plan again and write the
// zeros: gmm 7 more, tgmm 2, ragged_sort 4.
class Steps {
 public:
  Steps(const ExpertFfnArguments& a, Differentiable differentiable);

  // [R, D]: for each row, the row of x [T, D] of its token; times the weight of its slot.
  Tensor rows_of_tokens(const Tensor& x) const;
  Tensor weighted_rows_of_tokens(const Tensor& x) const;

  // [T, D]: for each token, the sum of its rows of all tensors [R, D], each times the weight of its slot. One tensor at
  // a time is in memory.
  Tensor weighted_sum_of_rows(std::initializer_list<std::function<Tensor()>> tensors) const;

  // [R, F]: the rows [R, D] times the matrices [L, D, F] of their experts, plus the biases [L, F]. Factors are left
  // out.
  Tensor multiply_rows(const Tensor& rows, const Projection& projection) const;

  // [L, D, F]: for each expert, its rows of lhs [R, D], transposed, times its rows of rhs [R, F].
  Tensor multiply_groups(const Tensor& lhs, const Tensor& rhs) const;

  // [R, D]: for each row, the bias [L, D] of its expert.
  Tensor rows_of_biases(const Tensor& biases) const;

  // Rows [R, r], each times the weight of its slot.
  Tensor times_weights(const Tensor& rows) const;

  // [R, 1]: for each row, the weight of its slot, in the dtype of x.
  Tensor column_of_weights() const;

  // [T * K]: for each slot, the value [R] of its row, 0 for a slot without a row.
  Tensor slots_of_rows(const Tensor& values) const;

  const bool is_differentiable;
  const at::ScalarType elementwise_type;

 private:
  Tensor weights_of_rows() const;

  const ExpertFfnArguments& a_;
  const RowGroups groups_;
  const Tensor token_of_row_;  // [R], undefined for differentiable steps
};

// Rows after a projection, and its reduced rows; undefined without factors.
struct Projected {
  Tensor rows;
  Tensor reduced;
};

Projected project(const Tensor& rows, const Projection& projection, const Steps& steps);

// The preactivations Z of all rows as the products give them. `up` is [R, F], or [R, 2F] with a fused gate; `gate`
// [R, F] is undefined unless gate is given. Saved for backward, `up` follows `gate` in the memory of one tensor
// [R, 2F]: elementwise kernels of devices are up to twice as fast with contiguous tensors.
struct Preactivations {
  Tensor gate;
  Tensor up;

  static Preactivations in(const Tensor& saved, const ExpertFfnArguments& a);
  // What the activation takes: gate and up, [R, F] each.
  std::pair<Tensor, Tensor> parts(GateLayout layout, at::ScalarType type) const;
};

// The preactivations and the reduced rows of gate and up. `saved` is defined if backward may read the preactivations.
struct ProjectedTokens {
  Preactivations preactivations;
  Tensor saved;
  Tensor reduced_gate;
  Tensor reduced_up;
};

ProjectedTokens project_tokens(const ExpertFfnArguments& a, const Steps& steps, bool is_saved);

// The reduced rows of gate, up and down, which may be undefined, side by side in one tensor.
struct Reduced {
  Tensor gate, up, down;

  static Reduced in(const Tensor& columns, const ExpertFfnArguments& a);
  Tensor side_by_side(const ExpertFfnArguments& a) const;
};

}  // namespace maxmoe::ops
