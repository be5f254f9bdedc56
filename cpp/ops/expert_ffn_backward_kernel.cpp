// The backward pass of expert_ffn on the CPU: turns tensors into views of memory, and calls the kernels.
#include <ATen/ops/zeros.h>

#include "kernels/experts/tgmm.h"
#include "ops/expert_ffn_views.h"

namespace maxmoe::ops {
namespace {

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

// Computes the intermediates again, with the same bits as in the forward pass.
template <class T>
Intermediates recomputed(const ExpertFfnArguments& a) {
  const Intermediates results = empty_intermediates(a.slots.size(0), a);
  ExpertFfn<T> arguments = forward_arguments<T>(a);
  arguments.preactivations = view<T>(results.preactivations);
  arguments.reduced = reduced_rows<T>(results.reduced, a);
  maxmoe::expert_ffn(arguments, torch_executor());
  return results;
}

// The tensors of the low-rank factors of down that its backward pass reads.
struct DownFactors {
  Tensor grad_reduced;      // [R, r]
  Tensor weighted_reduced;  // [R, r]
};

// The next functions compute the gradients of the factors of down, of down, of x, and of gate and up. The first one
// reads the preactivations. The second one overwrites them with their gradient, which the others read, if a wanted
// gradient needs it.
template <class T>
DownFactors backward_down_factors(const Tensor& grad_out, const Intermediates& kept, const Wanted& wanted,
                                  const ExpertFfnArguments& a, Gradients& grads) {
  const int64_t rank = a.down_factors().rank();
  const bool needs_grad_reduced = wanted.down_a || needs_grad_activated(wanted);
  const auto work_space = [&](bool is_needed) { return empty({is_needed ? a.slots.size(0) : 0, rank}, a.x.options()); };
  const DownFactors results{work_space(needs_grad_reduced), work_space(wanted.down_b)};
  grads.down_a = empty_matrices(wanted.down_a, a.down_a, a.x.options());
  if (rank == 0) return results;
  ExpertFfnBackwardDownFactors<T> arguments{};
  arguments.grad_out = const_view<T>(grad_out);
  arguments.weights = const_pointer<Accumulator<T>>(a.weights);
  arguments.routed = routed_rows(a);
  arguments.factors = expert_weights<T>(a).down_factors;
  arguments.kind = a.kind();
  arguments.gemm = &best_gemm<T>();
  arguments.preactivations = const_view<T>(kept.preactivations);
  arguments.reduced = reduced_rows<T>(kept.reduced, a).down.as_const();
  arguments.grad_reduced = view_if<T>(needs_grad_reduced, results.grad_reduced);
  arguments.weighted_reduced = view_if<T>(wanted.down_b, results.weighted_reduced);
  arguments.grad_reduce = stack_if<T>(wanted.down_a, grads.down_a);
  expert_ffn_backward_down_factors(arguments, torch_executor());
  return results;
}

template <class T>
void backward_down(const Tensor& grad_out, const Tensor& preactivations, const DownFactors& factors,
                   const Wanted& wanted, const ExpertFfnArguments& a, Gradients& grads) {
  const auto options = a.x.options();
  // Work space for the gradient of down. grads.weights is zero for slots without a row, which the kernel does not
  // write.
  const Tensor activated = empty({wanted.down ? a.slots.size(0) : 0, a.intermediate_size()}, options);
  grads.weights = at::zeros({wanted.weights ? a.rows.numel() : 0}, options.dtype(accumulator_type(a.x.scalar_type())));
  grads.down = empty_matrices(wanted.down, a.down, options);
  grads.down_b = empty_matrices(wanted.down_b, a.down_b, options);
  grads.down_bias = empty_gradient(wanted.down_bias, a.down_bias, options);
  const ExpertWeights<T> experts = expert_weights<T>(a);
  ExpertFfnBackwardDown<T> arguments{};
  arguments.grad_out = const_view<T>(grad_out);
  arguments.weights = const_pointer<Accumulator<T>>(a.weights);
  arguments.routed = routed_rows(a);
  arguments.down = experts.down;
  arguments.down_bias = experts.down_bias;
  arguments.factors = experts.down_factors;
  arguments.grad_reduced = const_view<T>(factors.grad_reduced);
  arguments.weighted_reduced = const_view<T>(factors.weighted_reduced);
  arguments.kind = a.kind();
  arguments.gemm = &best_gemm<T>();
  arguments.preactivations = view<T>(preactivations);
  arguments.keeps_preactivations = !needs_grad_activated(wanted);
  arguments.activated = view_if<T>(wanted.down, activated);
  arguments.grad_weights = wanted.weights ? pointer<Accumulator<T>>(grads.weights) : nullptr;
  arguments.grad_down = stack_if<T>(wanted.down, grads.down);
  arguments.grad_expand = stack_if<T>(wanted.down_b, grads.down_b);
  arguments.grad_down_bias = view_if<T>(wanted.down_bias, grads.down_bias);
  expert_ffn_backward_down(arguments, torch_executor());
}

// Returns the gradients of the reduced rows of gate and up.
template <class T>
Tensor backward_input(const Tensor& grad_preactivations, const Wanted& wanted, const ExpertFfnArguments& a,
                      Gradients& grads) {
  const auto options = a.x.options();
  grads.x = empty_gradient(wanted.x, a.x, options);
  const bool needs_grad_reduced = wanted.x || wanted.gate_a || wanted.up_a;
  const Tensor grad_reduced = empty({needs_grad_reduced ? a.slots.size(0) : 0, a.reduced_width()}, options);
  if (!needs_grad_reduced) return grad_reduced;
  const Tensor rows = empty({wanted.x ? a.slots.size(0) : 0, a.x.size(1)}, options);
  const ExpertWeights<T> experts = expert_weights<T>(a);
  ExpertFfnBackwardInput<T> arguments{};
  arguments.grad_preactivations = const_view<T>(grad_preactivations);
  arguments.routed = routed_rows(a);
  arguments.gate = experts.gate;
  arguments.up = experts.up;
  arguments.gate_factors = experts.gate_factors;
  arguments.up_factors = experts.up_factors;
  arguments.gemm = &best_gemm<T>();
  arguments.rows = view_if<T>(wanted.x, rows);
  arguments.grad_reduced = reduced_rows<T>(grad_reduced, a);
  arguments.grad_x = view_if<T>(wanted.x, grads.x);
  expert_ffn_backward_input(arguments, torch_executor());
  return grad_reduced;
}

// The gradient of a factor `b`: for each expert, its reduced rows, transposed, times the gradient of their product.
template <class T>
Tensor grad_expand(bool is_wanted, ConstMatrixView<T> reduced, ConstMatrixView<T> grad, const OptionalTensor& factor,
                   const ExpertFfnArguments& a) {
  const Tensor result = empty_matrices(is_wanted, factor, a.x.options());
  if (!is_wanted) return result;
  const RoutedRows routed = routed_rows(a);
  Tgmm<T> arguments{reduced, grad, routed.group_sizes, routed.num_groups, 0, &best_gemm<T>(), {}};
  if (is_transposed(result)) {
    std::swap(arguments.lhs, arguments.rhs);
    arguments.out = stack<T>(result.transpose(1, 2));
  } else {
    arguments.out = stack<T>(result);
  }
  maxmoe::tgmm(arguments, torch_executor());
  return result;
}

template <class T>
void backward_up(const Tensor& grad_preactivations, const Tensor& reduced, const Tensor& grad_reduced,
                 const Wanted& wanted, const ExpertFfnArguments& a, Gradients& grads) {
  const auto options = a.x.options();
  const int64_t gate_width = a.gate.has_value() ? a.up_width() : 0;
  const ConstMatrixView<T> grad = const_view<T>(grad_preactivations);
  const ReducedRows<T> rows = reduced_rows<T>(reduced, a);
  grads.gate_b = grad_expand<T>(wanted.gate_b, rows.gate.as_const(), grad.column_range(0, gate_width), a.gate_b, a);
  grads.up_b = grad_expand<T>(wanted.up_b, rows.up.as_const(), grad.column_range(gate_width, grad.columns), a.up_b, a);
  grads.gate = empty_matrices(wanted.gate, a.gate, options);
  grads.up = empty_matrices(wanted.up, a.up, options);
  grads.gate_a = empty_matrices(wanted.gate_a, a.gate_a, options);
  grads.up_a = empty_matrices(wanted.up_a, a.up_a, options);
  grads.gate_bias = empty_gradient(wanted.gate_bias, a.gate_bias, options);
  grads.up_bias = empty_gradient(wanted.up_bias, a.up_bias, options);
  if (!wanted.gate && !wanted.up && !wanted.gate_a && !wanted.up_a && !wanted.gate_bias && !wanted.up_bias) return;
  const ReducedRows<T> grad_rows = reduced_rows<T>(grad_reduced, a);
  ExpertFfnBackwardUp<T> arguments{};
  arguments.x = const_view<T>(a.x);
  arguments.grad_preactivations = grad;
  arguments.gate_width = gate_width;
  arguments.routed = routed_rows(a);
  arguments.gemm = &best_gemm<T>();
  arguments.gate_grad_reduced = grad_rows.gate.as_const();
  arguments.up_grad_reduced = grad_rows.up.as_const();
  arguments.grad_gate = stack_if<T>(wanted.gate, grads.gate);
  arguments.grad_up = stack_if<T>(wanted.up, grads.up);
  arguments.gate_grad_reduce = stack_if<T>(wanted.gate_a, grads.gate_a);
  arguments.up_grad_reduce = stack_if<T>(wanted.up_a, grads.up_a);
  arguments.grad_gate_bias = view_if<T>(wanted.gate_bias, grads.gate_bias);
  arguments.grad_up_bias = view_if<T>(wanted.up_bias, grads.up_bias);
  expert_ffn_backward_up(arguments, torch_executor());
}

}  // namespace

Gradients expert_ffn_backward_kernel(const Tensor& grad_out, const std::optional<Intermediates>& kept,
                                     const Wanted& wanted, const ExpertFfnArguments& a) {
  const ExpertFfnArguments k = kernel_layout(a);
  const Tensor grad = contiguous_rows(grad_out);
  Gradients grads;
  for_dtype(a.x.scalar_type(), [&]<class T>() {
    const Intermediates rows = kept.has_value()
                                   ? Intermediates{kept->preactivations.contiguous(), kept->reduced.contiguous()}
                                   : recomputed<T>(k);
    // One kernel after the other, so that the work space of each one is freed before the next one.
    backward_down<T>(grad, rows.preactivations, backward_down_factors<T>(grad, rows, wanted, k, grads), wanted, k,
                     grads);
    const Tensor grad_reduced = backward_input<T>(rows.preactivations, wanted, k, grads);
    backward_up<T>(rows.preactivations, rows.reduced, grad_reduced, wanted, k, grads);
  });
  return grads;
}

}  // namespace maxmoe::ops
