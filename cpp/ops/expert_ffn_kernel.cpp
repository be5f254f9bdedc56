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

// The arguments in the layout that the kernels read, for as long as the views live.
struct KernelArguments {
  explicit KernelArguments(const ExpertFfnArguments& a)
      : x(contiguous_rows(a.x)),
        weights(accumulator_weights(a.weights, a.x.scalar_type())),
        slots(a.slots.contiguous()),
        rows(a.rows.contiguous()),
        group_sizes(a.group_sizes.contiguous()),
        top_k(a.top_k),
        gate(a.gate.has_value() ? OptionalTensor(gemm_operand(*a.gate)) : std::nullopt),
        up(gemm_operand(a.up)),
        down(gemm_operand(a.down)),
        gate_bias(contiguous(a.gate_bias)),
        up_bias(contiguous(a.up_bias)),
        down_bias(contiguous(a.down_bias)) {}

  RoutedRows routed() const {
    return {const_pointer<int64_t>(slots), const_pointer<int64_t>(rows), const_pointer<int64_t>(group_sizes),
            group_sizes.numel(), top_k};
  }

  template <class T>
  ExpertWeights<T> experts() const {
    const auto bias = [](const OptionalTensor& b) { return b.has_value() ? const_view<T>(*b) : ConstMatrixView<T>{}; };
    return {gate.has_value() ? const_stack<T>(*gate) : ConstMatrixStack<T>{},
            const_stack<T>(up),
            const_stack<T>(down),
            bias(gate_bias),
            bias(up_bias),
            bias(down_bias)};
  }

  Tensor x;
  OptionalTensor weights;
  Tensor slots;
  Tensor rows;
  Tensor group_sizes;
  int64_t top_k;
  OptionalTensor gate;
  Tensor up;
  Tensor down;
  OptionalTensor gate_bias;
  OptionalTensor up_bias;
  OptionalTensor down_bias;
};

}  // namespace

Outputs expert_ffn_kernel(const ExpertFfnArguments& a, bool keeps_preactivations) {
  const KernelArguments k(a);
  const int64_t num_rows = a.slots.size(0);
  const Tensor out = at::empty({a.x.size(0), a.x.size(1)}, a.x.options());
  const Tensor row_outputs = at::empty({num_rows, a.x.size(1)}, a.x.options());
  const Tensor preactivations =
      at::empty({keeps_preactivations ? num_rows : 0, a.preactivation_width()}, a.x.options());
  for_dtype(a.x.scalar_type(), [&]<class T>() {
    maxmoe::expert_ffn(ExpertFfn<T>{const_view<T>(k.x), const_pointer<Accumulator<T>>(k.weights), k.routed(),
                                    k.experts<T>(), a.kind(), &torch_gemm<T>(),
                                    keeps_preactivations ? view<T>(preactivations) : MatrixView<T>{},
                                    view<T>(row_outputs), view<T>(out)},
                       torch_executor());
  });
  return {out, preactivations};
}

Gradients expert_ffn_backward_kernel(const Tensor& grad_out, const Tensor& preactivations, const OutputMask& wanted,
                          const ExpertFfnArguments& a) {
  const KernelArguments k(a);
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
                             k.routed(), k.experts<T>(), a.kind(), &torch_gemm<T>(), const_view<T>(z), view<T>(grad_z),
                             matrix(wanted[kDown], activated), matrix(wanted[kX], grad_rows),
                             matrix(wanted[kX], grad_x),
                             wanted[kWeights] ? pointer<Accumulator<T>>(grad_weights) : nullptr,
                             matrices(wanted[kGate], grad_gate), matrices(wanted[kUp], grad_up),
                             matrices(wanted[kDown], grad_down), matrix(wanted[kGateBias], grad_gate_bias),
                             matrix(wanted[kUpBias], grad_up_bias), matrix(wanted[kDownBias], grad_down_bias)},
        torch_executor());
  });
  return {grad_x,  grad_weights,   grad_gate,    grad_up,
          grad_down, grad_gate_bias, grad_up_bias, grad_down_bias};
}

}  // namespace maxmoe::ops
