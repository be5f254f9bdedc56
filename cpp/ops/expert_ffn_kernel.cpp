// expert_ffn on the CPU: from tensors to the kernels.
#include <ATen/ops/zeros.h>

#include "ops/backend.h"
#include "ops/expert_ffn.h"
#include "ops/memory.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor.has_value() ? OptionalTensor(tensor->contiguous()) : std::nullopt;
}

// The same arguments in the layout that the kernels read. The views below live as long as it does.
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

// In the memory layout of the matrices, so that the gradient of a transposed parameter need not be turned round.
Tensor empty_gradient(const Tensor& matrices) {
  const int64_t count = matrices.size(0);
  const int64_t rows = matrices.size(1);
  const int64_t columns = matrices.size(2);
  if (!is_transposed(matrices)) return empty({count, rows, columns}, matrices.options());
  return empty({count, columns, rows}, matrices.options()).transpose(1, 2);
}

}  // namespace

Outputs expert_ffn_kernel(const ExpertFfnArguments& a, bool keeps_preactivations) {
  const ExpertFfnArguments k = kernel_layout(a);
  const int64_t num_rows = a.slots.size(0);
  const Tensor out = empty({a.x.size(0), a.x.size(1)}, a.x.options());
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

Gradients expert_ffn_backward_kernel(const Tensor& grad_out, const Tensor& preactivations, const OutputMask& wanted,
                                     const ExpertFfnArguments& a) {
  const ExpertFfnArguments k = kernel_layout(a);
  const Tensor grad = contiguous_rows(grad_out);
  const Tensor z = preactivations.contiguous();
  const int64_t num_rows = a.slots.size(0);
  Gradients grads;
  for_dtype(a.x.scalar_type(), [&]<class T>() {
    const auto empty = [&](at::IntArrayRef sizes) { return maxmoe::ops::empty(sizes, a.x.options()); };
    const auto matrix = [&](Tensor& out, Wanted which, const OptionalTensor& like) {
      out = empty(wanted[which] ? like->sizes() : at::IntArrayRef{0});
      return wanted[which] ? view<T>(out) : MatrixView<T>{};
    };
    const auto matrices = [&](Tensor& out, Wanted which, const OptionalTensor& like) {
      out = wanted[which] ? empty_gradient(*like) : empty({0});
      return wanted[which] ? stack<T>(out) : MatrixStack<T>{};
    };
    auto& [grad_x, grad_weights, grad_gate, grad_up, grad_down, grad_gate_bias, grad_up_bias, grad_down_bias] = grads;
    ExpertFfnBackward<T> b{};
    b.grad_out = const_view<T>(grad);
    b.x = const_view<T>(k.x);
    b.weights = const_pointer<Accumulator<T>>(k.weights);
    b.routed = routed_rows(k);
    b.experts = expert_weights<T>(k);
    b.kind = a.kind();
    b.gemm = &best_gemm<T>();
    b.continues = true;
    b.preactivations = view<T>(z);

    // One gradient after the other, so that the work space of one is free for the next.
    {
      const Tensor activated = empty({wanted[kDown] ? num_rows : 0, a.intermediate_size()});
      grad_weights =
          at::zeros({wanted[kWeights] ? a.rows.numel() : 0}, a.x.options().dtype(accumulator_type(a.x.scalar_type())));
      ExpertFfnBackward<T> down = b;
      down.continues = false;
      down.activated = wanted[kDown] ? view<T>(activated) : MatrixView<T>{};
      down.grad_weights = wanted[kWeights] ? pointer<Accumulator<T>>(grad_weights) : nullptr;
      down.grad_down = matrices(grad_down, kDown, a.down);
      down.grad_down_bias = matrix(grad_down_bias, kDownBias, a.down_bias);
      maxmoe::expert_ffn_backward(down, torch_executor());
    }
    {
      const Tensor grad_rows = empty({wanted[kX] ? num_rows : 0, a.x.size(1)});
      ExpertFfnBackward<T> input = b;
      input.grad_rows = view<T>(grad_rows);
      input.grad_x = matrix(grad_x, kX, a.x);
      maxmoe::expert_ffn_backward(input, torch_executor());
    }
    ExpertFfnBackward<T> up = b;
    up.grad_gate = matrices(grad_gate, kGate, a.gate);
    up.grad_up = matrices(grad_up, kUp, a.up);
    up.grad_gate_bias = matrix(grad_gate_bias, kGateBias, a.gate_bias);
    up.grad_up_bias = matrix(grad_up_bias, kUpBias, a.up_bias);
    maxmoe::expert_ffn_backward(up, torch_executor());
  });
  return grads;
}

}  // namespace maxmoe::ops
