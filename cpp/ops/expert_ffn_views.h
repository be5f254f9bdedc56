// The arguments of expert_ffn as views of memory, which the kernels of both passes read.
#pragma once

#include "kernels/experts/expert_ffn.h"
#include "ops/backend.h"
#include "ops/expert_ffn.h"
#include "ops/memory.h"
#include "ops/views.h"

namespace maxmoe::ops {

inline OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor.has_value() ? OptionalTensor(tensor->contiguous()) : std::nullopt;
}

// Returns the arguments in the layout that the kernels read; they own the memory of the views below.
inline ExpertFfnArguments kernel_layout(ExpertFfnArguments a) {
  a.x = contiguous_rows(a.x);
  a.weights = accumulator_weights(a.weights, a.x.scalar_type());
  a.slots = a.slots.contiguous();
  a.rows = a.rows.contiguous();
  a.group_sizes = a.group_sizes.contiguous();
  const auto lay_out = [](const Weights& given, auto& tensor, OptionalTensor& scales, OptionalTensor& zeros) {
    const Weights weights = given.in_kernel_layout();
    tensor = weights.tensor;
    scales = weights.scales;
    zeros = weights.zeros;
  };
  if (a.gate.has_value()) lay_out(a.gate_weights(), a.gate, a.gate_scales, a.gate_zeros);
  lay_out(a.up_weights(), a.up, a.up_scales, a.up_zeros);
  lay_out(a.down_weights(), a.down, a.down_scales, a.down_zeros);
  for (OptionalTensor* matrices : {&a.gate_a, &a.gate_b, &a.up_a, &a.up_b, &a.down_a, &a.down_b}) {
    if (matrices->has_value()) *matrices = gemm_operand(**matrices);
  }
  a.gate_bias = contiguous(a.gate_bias);
  a.up_bias = contiguous(a.up_bias);
  a.down_bias = contiguous(a.down_bias);
  return a;
}

inline RoutedRows routed_rows(const ExpertFfnArguments& a) {
  return {const_pointer<int64_t>(a.slots), const_pointer<int64_t>(a.rows), const_pointer<int64_t>(a.group_sizes),
          a.group_sizes.numel(), a.top_k};
}

template <class T>
ExpertWeights<T> expert_weights(const ExpertFfnArguments& a) {
  const auto bias = [](const OptionalTensor& b) { return b.has_value() ? const_view<T>(*b) : ConstMatrixView<T>{}; };
  const auto matrices = [](const OptionalTensor& m) {
    return m.has_value() ? const_stack<T>(*m) : ConstMatrixStack<T>{};
  };
  // Factors without columns add nothing.
  const auto factors = [&](const Factors& f) {
    return f.rank() > 0 ? LowRankFactors<T>{matrices(f.a), matrices(f.b)} : LowRankFactors<T>{};
  };
  const WeightStack<T> gate = a.gate.has_value() ? weight_view<T>(a.gate_weights()) : WeightStack<T>{};
  return {gate,
          weight_view<T>(a.up_weights()),
          weight_view<T>(a.down_weights()),
          bias(a.gate_bias),
          bias(a.up_bias),
          bias(a.down_bias),
          factors(a.gate_factors()),
          factors(a.up_factors()),
          factors(a.down_factors())};
}

// The columns of gate, up and down in a tensor of reduced rows.
template <class T>
ReducedRows<T> reduced_rows(const Tensor& reduced, const ExpertFfnArguments& a) {
  const auto columns_of = [&](const Factors& factors) {
    MatrixView<T> columns = view<T>(reduced);
    if (columns.data != nullptr) columns.data += factors.first_column;  // null without rows
    columns.columns = factors.rank();
    return columns;
  };
  return {columns_of(a.gate_factors()), columns_of(a.up_factors()), columns_of(a.down_factors())};
}

template <class T>
MatrixView<T> view_if(bool is_wanted, const Tensor& out) {
  return is_wanted ? view<T>(out) : MatrixView<T>{};
}

template <class T>
MatrixStack<T> stack_if(bool is_wanted, const Tensor& out) {
  return is_wanted ? stack<T>(out) : MatrixStack<T>{};
}

inline Intermediates empty_intermediates(int64_t num_rows, const ExpertFfnArguments& a) {
  return {empty({num_rows, a.preactivation_width()}, a.x.options()),
          empty({num_rows, a.reduced_width()}, a.x.options())};
}

template <class T>
ExpertFfn<T> forward_arguments(const ExpertFfnArguments& a) {
  ExpertFfn<T> arguments{};
  arguments.x = const_view<T>(a.x);
  arguments.routed = routed_rows(a);
  arguments.experts = expert_weights<T>(a);
  arguments.kind = a.kind();
  arguments.gemm = &best_gemm<T>();
  return arguments;
}

}  // namespace maxmoe::ops
