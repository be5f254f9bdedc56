// expert_ffn on the CPU: turns tensors into views of memory, and calls the kernels.
#include <ATen/ops/zeros.h>

#include "kernels/expert_ffn.h"
#include "ops/backend.h"
#include "ops/expert_ffn.h"
#include "ops/memory.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor.has_value() ? OptionalTensor(tensor->contiguous()) : std::nullopt;
}

// Returns the arguments in the layout that the kernels read; they own the memory of the views below.
ExpertFfnArguments kernel_layout(ExpertFfnArguments a) {
  a.x = contiguous_rows(a.x);
  a.weights = accumulator_weights(a.weights, a.x.scalar_type());
  a.slots = a.slots.contiguous();
  a.rows = a.rows.contiguous();
  a.group_sizes = a.group_sizes.contiguous();
  if (a.gate.has_value()) a.gate = gemm_operand(*a.gate);
  a.up = gemm_operand(a.up);
  a.down = gemm_operand(a.down);
  a.gate_bias = contiguous(a.gate_bias);
  a.up_bias = contiguous(a.up_bias);
  a.down_bias = contiguous(a.down_bias);
  return a;
}

RoutedRows routed_rows(const ExpertFfnArguments& a) {
  return {const_pointer<int64_t>(a.slots), const_pointer<int64_t>(a.rows), const_pointer<int64_t>(a.group_sizes),
          a.group_sizes.numel(), a.top_k};
}

template <class T>
ExpertWeights<T> expert_weights(const ExpertFfnArguments& a) {
  const auto bias = [](const OptionalTensor& b) { return b.has_value() ? const_view<T>(*b) : ConstMatrixView<T>{}; };
  return {a.gate.has_value() ? const_stack<T>(*a.gate) : ConstMatrixStack<T>{},
          const_stack<T>(a.up),
          const_stack<T>(a.down),
          bias(a.gate_bias),
          bias(a.up_bias),
          bias(a.down_bias)};
}

// Allocates the gradient of `argument`, with no elements if it is not wanted.
Tensor empty_gradient(bool is_wanted, const OptionalTensor& argument, const at::TensorOptions& options) {
  return empty(is_wanted ? argument->sizes() : at::IntArrayRef{0}, options);
}

// Allocates the gradient of matrices with their layout in memory, so that adding it to .grad of a transposed parameter
// does not transpose it.
Tensor empty_matrices(bool is_wanted, const OptionalTensor& matrices, const at::TensorOptions& options) {
  if (!is_wanted || !is_transposed(*matrices)) return empty_gradient(is_wanted, matrices, options);
  return empty(matrices->transpose(1, 2).sizes(), options).transpose(1, 2);
}

template <class T>
MatrixView<T> view_if(bool is_wanted, const Tensor& out) {
  return is_wanted ? view<T>(out) : MatrixView<T>{};
}

template <class T>
MatrixStack<T> stack_if(bool is_wanted, const Tensor& out) {
  return is_wanted ? stack<T>(out) : MatrixStack<T>{};
}

// Computes the preactivations again, with the same bits as in the forward pass.
template <class T>
Tensor recomputed_preactivations(const ExpertFfnArguments& a) {
  const Tensor preactivations = empty({a.slots.size(0), a.preactivation_width()}, a.x.options());
  ExpertFfn<T> arguments{};
  arguments.x = const_view<T>(a.x);
  arguments.routed = routed_rows(a);
  arguments.experts = expert_weights<T>(a);
  arguments.kind = a.kind();
  arguments.gemm = &best_gemm<T>();
  arguments.preactivations = view<T>(preactivations);
  maxmoe::expert_ffn(arguments, torch_executor());
  return preactivations;
}

// The next three functions compute the gradients of down, of x, and of gate and up. The first one overwrites the
// preactivations with their gradient, which the others read, if a wanted gradient needs it.
template <class T>
void backward_down(const Tensor& grad_out, const Tensor& preactivations, const Wanted& wanted,
                   const ExpertFfnArguments& a, Gradients& grads) {
  const auto options = a.x.options();
  // Work space for the gradient of down. grads.weights is zero for slots without a row, which the kernel does not
  // write.
  const Tensor activated = empty({wanted.down ? a.slots.size(0) : 0, a.intermediate_size()}, options);
  grads.weights = at::zeros({wanted.weights ? a.rows.numel() : 0}, options.dtype(accumulator_type(a.x.scalar_type())));
  grads.down = empty_matrices(wanted.down, a.down, options);
  grads.down_bias = empty_gradient(wanted.down_bias, a.down_bias, options);
  const ExpertWeights<T> experts = expert_weights<T>(a);
  ExpertFfnBackwardDown<T> arguments{};
  arguments.grad_out = const_view<T>(grad_out);
  arguments.weights = const_pointer<Accumulator<T>>(a.weights);
  arguments.routed = routed_rows(a);
  arguments.down = experts.down;
  arguments.down_bias = experts.down_bias;
  arguments.kind = a.kind();
  arguments.gemm = &best_gemm<T>();
  arguments.preactivations = view<T>(preactivations);
  arguments.keeps_preactivations = !needs_grad_activated(wanted);
  arguments.activated = view_if<T>(wanted.down, activated);
  arguments.grad_weights = wanted.weights ? pointer<Accumulator<T>>(grads.weights) : nullptr;
  arguments.grad_down = stack_if<T>(wanted.down, grads.down);
  arguments.grad_down_bias = view_if<T>(wanted.down_bias, grads.down_bias);
  expert_ffn_backward_down(arguments, torch_executor());
}

template <class T>
void backward_input(const Tensor& grad_preactivations, const Wanted& wanted, const ExpertFfnArguments& a,
                    Gradients& grads) {
  grads.x = empty_gradient(wanted.x, a.x, a.x.options());
  if (!wanted.x) return;
  const Tensor rows = empty({a.slots.size(0), a.x.size(1)}, a.x.options());
  const ExpertWeights<T> experts = expert_weights<T>(a);
  ExpertFfnBackwardInput<T> arguments{};
  arguments.grad_preactivations = const_view<T>(grad_preactivations);
  arguments.routed = routed_rows(a);
  arguments.gate = experts.gate;
  arguments.up = experts.up;
  arguments.gemm = &best_gemm<T>();
  arguments.rows = view<T>(rows);
  arguments.grad_x = view<T>(grads.x);
  expert_ffn_backward_input(arguments, torch_executor());
}

template <class T>
void backward_up(const Tensor& grad_preactivations, const Wanted& wanted, const ExpertFfnArguments& a,
                 Gradients& grads) {
  const auto options = a.x.options();
  grads.gate = empty_matrices(wanted.gate, a.gate, options);
  grads.up = empty_matrices(wanted.up, a.up, options);
  grads.gate_bias = empty_gradient(wanted.gate_bias, a.gate_bias, options);
  grads.up_bias = empty_gradient(wanted.up_bias, a.up_bias, options);
  if (!wanted.gate && !wanted.up && !wanted.gate_bias && !wanted.up_bias) return;
  ExpertFfnBackwardUp<T> arguments{};
  arguments.x = const_view<T>(a.x);
  arguments.grad_preactivations = const_view<T>(grad_preactivations);
  arguments.gate_width = a.gate.has_value() ? a.gate->size(2) : 0;
  arguments.routed = routed_rows(a);
  arguments.gemm = &best_gemm<T>();
  arguments.grad_gate = stack_if<T>(wanted.gate, grads.gate);
  arguments.grad_up = stack_if<T>(wanted.up, grads.up);
  arguments.grad_gate_bias = view_if<T>(wanted.gate_bias, grads.gate_bias);
  arguments.grad_up_bias = view_if<T>(wanted.up_bias, grads.up_bias);
  expert_ffn_backward_up(arguments, torch_executor());
}

}  // namespace

Outputs expert_ffn_kernel(const ExpertFfnArguments& a, bool keeps_preactivations) {
  const ExpertFfnArguments k = kernel_layout(a);
  const int64_t num_rows = a.slots.size(0);
  const Tensor out = empty({a.x.size(0), a.x.size(1)}, a.x.options());
  // The output of each row is work space. Summing rows into `out` at once would add them in the order of the threads.
  const Tensor row_outputs = empty({num_rows, a.x.size(1)}, a.x.options());
  const Tensor preactivations = empty({keeps_preactivations ? num_rows : 0, a.preactivation_width()}, a.x.options());
  for_dtype(a.x.scalar_type(), [&]<class T>() {
    maxmoe::expert_ffn(
        ExpertFfn<T>{const_view<T>(k.x), const_pointer<Accumulator<T>>(k.weights), routed_rows(k), expert_weights<T>(k),
                     a.kind(), &best_gemm<T>(), keeps_preactivations ? view<T>(preactivations) : MatrixView<T>{},
                     view<T>(row_outputs), view<T>(out)},
        torch_executor());
  });
  return {out, preactivations};
}

Gradients expert_ffn_backward_kernel(const Tensor& grad_out, const OptionalTensor& preactivations, const Wanted& wanted,
                                     const ExpertFfnArguments& a) {
  const ExpertFfnArguments k = kernel_layout(a);
  const Tensor grad = contiguous_rows(grad_out);
  Gradients grads;
  for_dtype(a.x.scalar_type(), [&]<class T>() {
    const Tensor z = preactivations.has_value() ? preactivations->contiguous() : recomputed_preactivations<T>(k);
    // Three kernels instead of one, so that the work space of each kernel is freed before the next one.
    backward_down<T>(grad, z, wanted, k, grads);
    backward_input<T>(z, wanted, k, grads);
    backward_up<T>(z, wanted, k, grads);
  });
  return grads;
}

}  // namespace maxmoe::ops
