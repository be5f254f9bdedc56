// expert_ffn and its backward pass on the CPU: turns tensors into views of memory, and calls the kernels.
#include <ATen/ops/zeros.h>

#include "kernels/experts/expert_ffn.h"
#include "kernels/experts/tgmm.h"
#include "ops/backend.h"
#include "ops/expert_ffn/expert_ffn.h"
#include "ops/memory.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// Returns the arguments in the layout that the kernels read; they own the memory of the views below.
ExpertFfnArguments kernel_layout(ExpertFfnArguments a) {
  a.x = contiguous_rows(a.x);
  a.weights = accumulator_weights(a.weights, a.x.scalar_type());
  a.slots = a.slots.contiguous();
  a.rows = a.rows.contiguous();
  a.group_sizes = a.group_sizes.contiguous();
  for (Projection* projection : {&a.gate, &a.up, &a.down}) *projection = projection->in_kernel_layout();
  return a;
}

RoutedRows routed_rows(const ExpertFfnArguments& a) {
  return {const_pointer<int64_t>(a.slots), const_pointer<int64_t>(a.rows), const_pointer<int64_t>(a.group_sizes),
          a.group_sizes.numel(), a.top_k};
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

// The arguments that the kernels share.
template <class T>
ExpertFfnCall<T> kernel_call(const ExpertFfnArguments& a) {
  return {const_view<T>(a.x), const_pointer<Accumulator<T>>(a.weights),
          routed_rows(a),     {projection_view<T>(a.gate), projection_view<T>(a.up), projection_view<T>(a.down)},
          a.kind(),           &kernel_gemm<T>()};
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

// Computes the intermediates again, with the same bits as in the forward pass.
template <class T>
Intermediates recomputed(const ExpertFfnArguments& a) {
  const Intermediates results = empty_intermediates(a.slots.size(0), a);
  ExpertFfn<T> arguments{kernel_call<T>(a)};
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
  const int64_t rank = a.down.rank();
  const bool needs_grad_reduced = wanted.down.a || needs_grad_activated(wanted);
  const auto work_space = [&](bool is_needed) { return empty({is_needed ? a.slots.size(0) : 0, rank}, a.x.options()); };
  const DownFactors results{work_space(needs_grad_reduced), work_space(wanted.down.b)};
  grads.down.a = empty_matrices(wanted.down.a, a.down.a, a.x.options());
  if (rank == 0) return results;
  ExpertFfnBackwardDownFactors<T> arguments{kernel_call<T>(a)};
  arguments.grad_out = const_view<T>(grad_out);
  arguments.preactivations = const_view<T>(kept.preactivations);
  arguments.reduced = reduced_rows<T>(kept.reduced, a).down.as_const();
  arguments.grad_reduced = view_if<T>(needs_grad_reduced, results.grad_reduced);
  arguments.weighted_reduced = view_if<T>(wanted.down.b, results.weighted_reduced);
  arguments.grad_a = stack_if<T>(wanted.down.a, grads.down.a);
  expert_ffn_backward_down_factors(arguments, torch_executor());
  return results;
}

template <class T>
void backward_down(const Tensor& grad_out, const Tensor& preactivations, const DownFactors& factors,
                   const Wanted& wanted, const ExpertFfnArguments& a, Gradients& grads) {
  const auto options = a.x.options();
  // Work space for the gradient of down. grads.weights is zero for slots without a row, which the kernel does not
  // write.
  const Tensor activated = empty({wanted.down.weights ? a.slots.size(0) : 0, a.intermediate_size()}, options);
  grads.weights = at::zeros({wanted.weights ? a.rows.numel() : 0}, options.dtype(accumulator_type(a.x.scalar_type())));
  grads.down.weights = empty_matrices(wanted.down.weights, a.down.tensor, options);
  grads.down.b = empty_matrices(wanted.down.b, a.down.b, options);
  grads.down.bias = empty_gradient(wanted.down.bias, a.down.bias, options);
  ExpertFfnBackwardDown<T> arguments{kernel_call<T>(a)};
  arguments.grad_out = const_view<T>(grad_out);
  arguments.grad_reduced = const_view<T>(factors.grad_reduced);
  arguments.weighted_reduced = const_view<T>(factors.weighted_reduced);
  arguments.preactivations = view<T>(preactivations);
  arguments.keeps_preactivations = !needs_grad_activated(wanted);
  arguments.activated = view_if<T>(wanted.down.weights, activated);
  arguments.grad_weights = wanted.weights ? pointer<Accumulator<T>>(grads.weights) : nullptr;
  arguments.grad_down = stack_if<T>(wanted.down.weights, grads.down.weights);
  arguments.grad_b = stack_if<T>(wanted.down.b, grads.down.b);
  arguments.grad_bias = view_if<T>(wanted.down.bias, grads.down.bias);
  expert_ffn_backward_down(arguments, torch_executor());
}

// Returns the gradients of the reduced rows of gate and up.
template <class T>
Tensor backward_input(const Tensor& grad_preactivations, const Wanted& wanted, const ExpertFfnArguments& a,
                      Gradients& grads) {
  const auto options = a.x.options();
  grads.x = empty_gradient(wanted.x, a.x, options);
  const bool needs_grad_reduced = wanted.x || wanted.gate.a || wanted.up.a;
  const Tensor grad_reduced = empty({needs_grad_reduced ? a.slots.size(0) : 0, a.reduced_width()}, options);
  if (!needs_grad_reduced) return grad_reduced;
  const Tensor rows = empty({wanted.x ? a.slots.size(0) : 0, a.x.size(1)}, options);
  ExpertFfnBackwardInput<T> arguments{kernel_call<T>(a)};
  arguments.grad_preactivations = const_view<T>(grad_preactivations);
  arguments.rows = view_if<T>(wanted.x, rows);
  arguments.grad_reduced = reduced_rows<T>(grad_reduced, a);
  arguments.grad_x = view_if<T>(wanted.x, grads.x);
  expert_ffn_backward_input(arguments, torch_executor());
  return grad_reduced;
}

// The gradient of a factor `b`: for each expert, its reduced rows, transposed, times the gradient of their product.
template <class T>
Tensor gradient_of_b(bool is_wanted, ConstMatrixView<T> reduced, ConstMatrixView<T> grad, const OptionalTensor& factor,
                     const ExpertFfnArguments& a) {
  const Tensor result = empty_matrices(is_wanted, factor, a.x.options());
  if (!is_wanted) return result;
  const RoutedRows routed = routed_rows(a);
  Tgmm<T> arguments{reduced, grad, routed.group_sizes, routed.num_groups, 0, &kernel_gemm<T>(), {}};
  if (is_transposed(result)) {
    std::swap(arguments.lhs, arguments.rhs);
    arguments.out = stack<T>(result.transpose(1, 2));
  } else {
    arguments.out = stack<T>(result);
  }
  maxmoe::tgmm(arguments, torch_executor());
  return result;
}

// Allocates the gradients of a projection of the tokens, but for `b`; returns the views that a kernel writes.
template <class T>
TokenProjectionGradients<T> empty_gradients(const Projection& projection, const PerTensor<bool>& wanted,
                                            MatrixView<T> grad_reduced, const at::TensorOptions& options,
                                            PerTensor<Tensor>& grads) {
  grads.weights = empty_matrices(wanted.weights, projection.tensor, options);
  grads.a = empty_matrices(wanted.a, projection.a, options);
  grads.bias = empty_gradient(wanted.bias, projection.bias, options);
  return {grad_reduced.as_const(), stack_if<T>(wanted.weights, grads.weights), stack_if<T>(wanted.a, grads.a),
          view_if<T>(wanted.bias, grads.bias)};
}

template <class T>
void backward_up(const Tensor& grad_preactivations, const Tensor& reduced, const Tensor& grad_reduced,
                 const Wanted& wanted, const ExpertFfnArguments& a, Gradients& grads) {
  const auto options = a.x.options();
  const int64_t gate_width = a.gate.is_given() ? a.up_width() : 0;
  const ConstMatrixView<T> grad = const_view<T>(grad_preactivations);
  const ReducedRows<T> rows = reduced_rows<T>(reduced, a);
  grads.gate.b = gradient_of_b<T>(wanted.gate.b, rows.gate.as_const(), grad.column_range(0, gate_width), a.gate.b, a);
  grads.up.b =
      gradient_of_b<T>(wanted.up.b, rows.up.as_const(), grad.column_range(gate_width, grad.columns), a.up.b, a);
  const ReducedRows<T> grad_rows = reduced_rows<T>(grad_reduced, a);
  ExpertFfnBackwardUp<T> arguments{kernel_call<T>(a)};
  arguments.gate = empty_gradients<T>(a.gate, wanted.gate, grad_rows.gate, options, grads.gate);
  arguments.up = empty_gradients<T>(a.up, wanted.up, grad_rows.up, options, grads.up);
  const auto is_any = [](const PerTensor<bool>& of) { return of.weights || of.a || of.bias; };
  if (!is_any(wanted.gate) && !is_any(wanted.up)) return;
  arguments.grad_preactivations = grad;
  expert_ffn_backward_up(arguments, torch_executor());
}

}  // namespace

Intermediates empty_intermediates(int64_t num_rows, const ExpertFfnArguments& a) {
  return {empty({num_rows, a.preactivation_width()}, a.x.options()),
          empty({num_rows, a.reduced_width()}, a.x.options()), empty({num_rows, 0}, a.x.options())};
}

Tensor expert_ffn_kernel(const ExpertFfnArguments& a, const Intermediates* kept) {
  const ExpertFfnArguments k = kernel_layout(a);
  const Tensor out = empty({a.x.size(0), a.x.size(1)}, a.x.options());
  // The output of each row is work space. Summing rows into `out` at once would add them in the order of the threads.
  const Tensor row_outputs = empty({a.slots.size(0), a.x.size(1)}, a.x.options());
  for_dtype(a.x.scalar_type(), [&]<class T>() {
    ExpertFfn<T> arguments{kernel_call<T>(k)};
    if (kept != nullptr) {
      arguments.preactivations = view<T>(kept->preactivations);
      arguments.reduced = reduced_rows<T>(kept->reduced, k);
    }
    arguments.rows = view<T>(row_outputs);
    arguments.out = view<T>(out);
    maxmoe::expert_ffn(arguments, torch_executor());
  });
  return out;
}

Gradients expert_ffn_backward_kernel(const Tensor& grad_out, const std::optional<Intermediates>& kept,
                                     const Wanted& wanted, const ExpertFfnArguments& a) {
  const ExpertFfnArguments k = kernel_layout(a);
  const Tensor grad = contiguous_rows(grad_out);
  Gradients grads;
  for_dtype(a.x.scalar_type(), [&]<class T>() {
    const Intermediates rows =
        kept.has_value() ? Intermediates{kept->preactivations.contiguous(), kept->reduced.contiguous(), kept->gate}
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
