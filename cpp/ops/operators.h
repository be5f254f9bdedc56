// Operators that other operators call: most backward passes consist of them.
#pragma once

#include "ops/operator.h"
#include "ops/projection.h"

namespace maxmoe::ops {

inline constexpr Operator<"linear", Tensor(const Tensor& x, const Tensor& weight, const OptionalTensor& bias,
                                           std::optional<at::ScalarType> out_dtype)>
    linear;

// Returns weights, experts and probabilities.
inline constexpr Operator<"route", std::tuple<Tensor, Tensor, Tensor>(
                                       const Tensor& logits, int64_t top_k, std::string_view score_function,
                                       const OptionalTensor& correction_bias, int64_t num_groups, int64_t top_k_groups,
                                       std::string_view group_score, std::string_view normalization, double scale,
                                       const OptionalTensor& experts)>
    route;

// sum_{t, e} -p[t, e] log(p[t, e]) / divisor, a constant for autograd.
inline constexpr Operator<"router_entropy", Tensor(const Tensor& probabilities, c10::SymInt divisor)> router_entropy;

// Returns slots, rows, group sizes and the number of dropped slots.
inline constexpr Operator<"ragged_plan", std::tuple<Tensor, Tensor, Tensor, Tensor>(
                                             const Tensor& experts, int64_t num_experts, int64_t first_expert,
                                             std::optional<int64_t> num_local_experts,
                                             std::optional<c10::SymInt> max_rows, std::optional<c10::SymInt> num_rows)>
    ragged_plan;

inline constexpr Operator<"dequantize", Tensor(const Tensor& codes, const Tensor& scales, const OptionalTensor& zeros,
                                               const OptionalTensor& row_scales, std::string_view format,
                                               int64_t columns, at::ScalarType dtype)>
    dequantize;

struct GmmArguments {
  Tensor lhs;
  Tensor group_sizes;
  Projection rhs;
  int64_t group_offset = 0;
  OptionalTensor reduced = {};  // [R, r]: lhs times rhs.a; no gradient is computed for it

  template <class Self>
  static auto fields(Self& a) {
    return std::tuple_cat(std::tie(a.lhs, a.group_sizes), Projection::fields(a.rhs),
                          std::tie(a.group_offset, a.reduced));
  }
};

inline constexpr Operator<"gmm", Signature<Tensor, GmmArguments>> gmm_operator;

inline Tensor gmm(const Tensor& lhs, const Projection& rhs, const Tensor& group_sizes, int64_t group_offset,
                  const OptionalTensor& reduced = std::nullopt) {
  return std::apply(
      [&](const auto&... fields) { return gmm_operator(lhs, group_sizes, fields..., group_offset, reduced); },
      Projection::fields(rhs));
}

inline constexpr Operator<"tgmm", Tensor(const Tensor& lhs, const Tensor& rhs, const Tensor& group_sizes,
                                         int64_t num_local_groups, int64_t group_offset)>
    tgmm;

inline constexpr Operator<"ragged_sort", Tensor(const Tensor& x, const Tensor& slots, const Tensor& rows, int64_t top_k,
                                                const OptionalTensor& weights)>
    ragged_sort;

inline constexpr Operator<"ragged_unsort", Tensor(const Tensor& rows, const Tensor& slots, const Tensor& row_of_slot,
                                                  int64_t top_k, const OptionalTensor& weights)>
    ragged_unsort;

inline constexpr Operator<"ragged_gather", Tensor(const Tensor& x, const Tensor& index, const OptionalTensor& weights,
                                                  c10::SymInt start, std::optional<c10::SymInt> end)>
    ragged_gather;

inline constexpr Operator<"ragged_gather_reduce", Tensor(const Tensor& rows, const Tensor& index, int64_t group_size,
                                                         const OptionalTensor& weights, const OptionalTensor& valid)>
    ragged_gather_reduce;

inline constexpr Operator<"ragged_scatter_add", Tensor(const Tensor& rows, const Tensor& index, c10::SymInt num_rows,
                                                       int64_t group_size, const OptionalTensor& weights)>
    ragged_scatter_add;

inline constexpr Operator<"ragged_dot",
                          Tensor(const Tensor& a, const Tensor& b, const Tensor& index, int64_t group_size)>
    ragged_dot;

}  // namespace maxmoe::ops
