// What the operators gmm and gmm_low_rank share: the checks, the product, and the weights of a node.
#pragma once

#include <string>

#include "ops/operators.h"

namespace maxmoe::ops {

// The name in all messages, because users call only gmm.
inline constexpr const char* kGmm = "gmm";

// The arguments of both schemas after rhs and the factors.
inline const std::string kGmmOptions =
    "Tensor group_sizes, *, Tensor? bias=None, int group_offset=0, Tensor? rhs_scales=None, Tensor? rhs_zeros=None, "
    "str? rhs_format=None, int rhs_columns=0, bool rhs_is_transposed=False";

void check_gmm(const Tensor& lhs, const Weights& rhs, const Tensor& group_sizes, const OptionalTensor& bias);

// The term that low-rank factors add: reduced [R, r] times the matrices of `expand` [L, r, F].
struct LowRankTerm {
  Tensor reduced;
  Tensor expand;
};

// The product, for arguments that have been checked.
Tensor multiply_grouped(const Tensor& lhs, const Weights& rhs, const Tensor& group_sizes, const OptionalTensor& bias,
                        int64_t group_offset, const std::optional<LowRankTerm>& term = std::nullopt);

// The gradient of a bias: the sum of the rows of each group, as a product with a column of ones.
Tensor gradient_of_bias(const Tensor& grad, const Tensor& group_sizes, int64_t num_local_groups, int64_t group_offset);

// The weights among the saved data of a node; their tensors are saved beside them.
void save_weights(AutogradContext* ctx, const Weights& rhs);
Weights load_weights(AutogradContext* ctx, const Tensor& tensor, const Tensor& scales, const Tensor& zeros);

}  // namespace maxmoe::ops
