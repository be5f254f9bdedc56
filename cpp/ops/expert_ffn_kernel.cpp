// expert_ffn on the CPU: from tensors to the kernels.
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/zeros.h>

#include "ops/backend.h"
#include "ops/expert_ffn.h"
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

}  // namespace

Outputs expert_ffn_kernel(const ExpertFfnArguments& a, bool keeps_preactivations) {
  const ExpertFfnArguments k = kernel_layout(a);
  const int64_t num_rows = a.slots.size(0);
  const Tensor out = at::empty({a.x.size(0), a.x.size(1)}, a.x.options());
  const Tensor row_outputs = at::empty({num_rows, a.x.size(1)}, a.x.options());
  const Tensor preactivations =
      at::empty({keeps_preactivations ? num_rows : 0, a.preactivation_width()}, a.x.options());
  for_dtype(a.x.scalar_type(), [&]<class T>() {
    maxmoe::expert_ffn(
        ExpertFfn<T>{const_view<T>(k.x), const_pointer<Accumulator<T>>(k.weights), routed_rows(k), expert_weights<T>(k),
                     a.kind(), &torch_gemm<T>(), keeps_preactivations ? view<T>(preactivations) : MatrixView<T>{},
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
  const auto like = [&](bool is_wanted, at::IntArrayRef sizes) {
    return is_wanted ? at::empty(sizes, a.x.options()) : at::empty({0}, a.x.options());
  };
  const auto like_tensor = [&](Wanted which, const OptionalTensor& tensor) {
    return wanted[which] ? at::empty(tensor->sizes(), a.x.options()) : at::empty({0}, a.x.options());
  };
  const auto weights_options = a.x.options().dtype(accumulator_type(a.x.scalar_type()));
  const Tensor grad_z = at::empty_like(z);
  const Tensor activated = like(wanted[kDown], {num_rows, a.up.size(2)});
  const Tensor grad_rows = like(wanted[kX], {num_rows, a.x.size(1)});
  const Tensor grad_x = like(wanted[kX], a.x.sizes());
  const Tensor grad_weights = at::zeros({wanted[kWeights] ? a.rows.numel() : 0}, weights_options);
  const Tensor grad_gate = like_tensor(kGate, a.gate);
  const Tensor grad_up = like_tensor(kUp, a.up);
  const Tensor grad_down = like_tensor(kDown, a.down);
  const Tensor grad_gate_bias = like_tensor(kGateBias, a.gate_bias);
  const Tensor grad_up_bias = like_tensor(kUpBias, a.up_bias);
  const Tensor grad_down_bias = like_tensor(kDownBias, a.down_bias);

  for_dtype(a.x.scalar_type(), [&]<class T>() {
    const auto matrix = [](bool is_wanted, const Tensor& t) { return is_wanted ? view<T>(t) : MatrixView<T>{}; };
    const auto matrices = [](bool is_wanted, const Tensor& t) { return is_wanted ? stack<T>(t) : MatrixStack<T>{}; };
    maxmoe::expert_ffn_backward(
        ExpertFfnBackward<T>{const_view<T>(grad), const_view<T>(k.x), const_pointer<Accumulator<T>>(k.weights),
                             routed_rows(k), expert_weights<T>(k), a.kind(), &torch_gemm<T>(), const_view<T>(z),
                             view<T>(grad_z), matrix(wanted[kDown], activated), matrix(wanted[kX], grad_rows),
                             matrix(wanted[kX], grad_x),
                             wanted[kWeights] ? pointer<Accumulator<T>>(grad_weights) : nullptr,
                             matrices(wanted[kGate], grad_gate), matrices(wanted[kUp], grad_up),
                             matrices(wanted[kDown], grad_down), matrix(wanted[kGateBias], grad_gate_bias),
                             matrix(wanted[kUpBias], grad_up_bias), matrix(wanted[kDownBias], grad_down_bias)},
        torch_executor());
  });
  return {grad_x, grad_weights, grad_gate, grad_up, grad_down, grad_gate_bias, grad_up_bias, grad_down_bias};
}

}  // namespace maxmoe::ops
