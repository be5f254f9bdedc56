// The arguments of expert_ffn as views of memory, which the kernels of both passes read.
#pragma once

#include "kernels/experts/expert_ffn.h"
#include "ops/backend.h"
#include "ops/expert_ffn/expert_ffn.h"
#include "ops/memory.h"
#include "ops/views.h"

namespace maxmoe::ops {

// Returns the arguments in the layout that the kernels read; they own the memory of the views below.
inline ExpertFfnArguments kernel_layout(ExpertFfnArguments a) {
  a.x = contiguous_rows(a.x);
  a.weights = accumulator_weights(a.weights, a.x.scalar_type());
  a.slots = a.slots.contiguous();
  a.rows = a.rows.contiguous();
  a.group_sizes = a.group_sizes.contiguous();
  for (Projection* projection : {&a.gate, &a.up, &a.down}) *projection = projection->in_kernel_layout();
  return a;
}

inline RoutedRows routed_rows(const ExpertFfnArguments& a) {
  return {const_pointer<int64_t>(a.slots), const_pointer<int64_t>(a.rows), const_pointer<int64_t>(a.group_sizes),
          a.group_sizes.numel(), a.top_k};
}

template <class T>
ExpertProjections<T> projections(const ExpertFfnArguments& a) {
  return {projection_view<T>(a.gate), projection_view<T>(a.up), projection_view<T>(a.down)};
}

// The columns of gate, up and down in a tensor of reduced rows.
template <class T>
ReducedRows<T> reduced_rows(const Tensor& reduced, const ExpertFfnArguments& a) {
  MatrixView<T> rest = view<T>(reduced);
  const auto next_columns = [&](const Projection& projection) {
    MatrixView<T> columns = rest;
    columns.columns = projection.rank();
    if (rest.data != nullptr) rest.data += projection.rank();  // null without rows
    return columns;
  };
  // Braces fix the order of the calls.
  return {next_columns(a.gate), next_columns(a.up), next_columns(a.down)};
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
  arguments.experts = projections<T>(a);
  arguments.kind = a.kind();
  arguments.gemm = &best_gemm<T>();
  return arguments;
}

}  // namespace maxmoe::ops
