// Three operators: expert_ffn, which people call; expert_ffn_forward, which also returns what backward needs; and
// expert_ffn_backward.
#include "kernels/expert_ffn.h"

#include <ATen/TensorOperators.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/zeros.h>

#include <algorithm>
#include <array>
#include <limits>
#include <string_view>
#include <tuple>

#include "ops/activation.h"
#include "ops/autograd.h"
#include "ops/backend.h"
#include "ops/gmm.h"
#include "ops/ragged_dot.h"
#include "ops/ragged_sort.h"
#include "ops/ragged_unsort.h"
#include "ops/routed_rows.h"
#include "ops/tgmm.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kOp = "expert_ffn";

#define MAXMOE_EXPERT_FFN_SCHEMA                                                                             \
  "Tensor x, Tensor? weights, Tensor slots, Tensor rows, Tensor group_sizes, int top_k, Tensor? gate, "      \
  "Tensor up, Tensor down, *, Tensor? gate_bias=None, Tensor? up_bias=None, Tensor? down_bias=None, "        \
  "str activation=\"silu\", float? limit=None"

TORCH_LIBRARY_FRAGMENT(maxmoe, m) {
  m.def("expert_ffn(" MAXMOE_EXPERT_FFN_SCHEMA ") -> Tensor");
  m.def("expert_ffn_forward(" MAXMOE_EXPERT_FFN_SCHEMA ") -> (Tensor out, Tensor preactivations)");
  m.def(
      "expert_ffn_backward(Tensor grad_out, Tensor preactivations, bool[8] output_mask, " MAXMOE_EXPERT_FFN_SCHEMA
      ") -> (Tensor x, Tensor weights, Tensor gate, Tensor up, Tensor down, Tensor gate_bias, Tensor up_bias, "
      "Tensor down_bias)");
}

// The gradients, in the order of the schema. One that is not wanted is an empty tensor.
enum Wanted : uint8_t { kX, kWeights, kGate, kUp, kDown, kGateBias, kUpBias, kDownBias };
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;
using OutputMask = std::array<bool, 8>;

// What the three operators share. Tensors are as the caller gave them.
struct Arguments {
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
  std::string activation;
  std::optional<double> limit;

  ActivationKind kind() const {
    return {parse_activation(kOp, activation), gate.has_value(), limit.value_or(std::numeric_limits<double>::infinity())};
  }
  int64_t preactivation_width() const { return gate.has_value() ? 2 * up.size(2) : up.size(2); }
};

void check_matrices(const char* name, const Tensor& matrices, const Tensor& x, int64_t num_groups, int64_t rows,
                    int64_t columns) {
  Argument(kOp, name, matrices).has_dims(3, "a stack of matrices [L, ., .]").has_dtype_of("x", x).is_on_device_of("x", x);
  Argument(kOp, name, matrices).has_size(0, num_groups, "L of group_sizes");
  Argument(kOp, name, matrices).has_size(1, rows, "rows").has_size(2, columns, "columns");
}

void check_bias(const char* name, const OptionalTensor& bias, const Tensor& x, int64_t num_groups, int64_t columns) {
  if (!bias.has_value()) return;
  Argument(kOp, name, *bias).has_dims(2, "[L, .]").has_dtype_of("x", x).is_on_device_of("x", x);
  Argument(kOp, name, *bias).has_size(0, num_groups, "L of group_sizes").has_size(1, columns, "columns");
}

void check(const Arguments& a) {
  Argument(kOp, "x", a.x).has_dims(2, "[T, D]").is_floating();
  Argument(kOp, "up", a.up).has_dims(3, "[L, D, F]");
  const int64_t hidden_size = a.x.size(1);
  const int64_t width = a.up.size(2);
  check_group_sizes(kOp, a.group_sizes, a.x, a.slots.numel(), Sum::exactly);
  const int64_t num_groups = a.group_sizes.size(0);
  check_matrices("up", a.up, a.x, num_groups, hidden_size, width);
  check_matrices("down", a.down, a.x, num_groups, width, hidden_size);
  if (a.gate.has_value()) check_matrices("gate", *a.gate, a.x, num_groups, hidden_size, width);
  MAXMOE_CHECK(a.gate.has_value() || !a.gate_bias.has_value(), kOp, "gate_bias must be None without gate, got shape ",
               a.gate_bias->sizes());
  check_bias("gate_bias", a.gate_bias, a.x, num_groups, width);
  check_bias("up_bias", a.up_bias, a.x, num_groups, width);
  check_bias("down_bias", a.down_bias, a.x, num_groups, hidden_size);
  const ActivationKind kind = a.kind();
  MAXMOE_CHECK(a.gate.has_value() || kind.activation != Activation::swigluoai, kOp,
               "gate must be given for activation swigluoai, got None");
  MAXMOE_CHECK(a.gate.has_value() || !a.limit.has_value(), kOp, "limit must be None without gate, got ",
               a.limit.value_or(0));
  MAXMOE_CHECK(a.limit.value_or(1.0) > 0, kOp, "limit must be positive, got ", a.limit.value_or(1.0));
  check_weights(kOp, a.weights, a.x, a.x.size(0) * a.top_k);
  check_routed_rows(kOp, a.slots, a.rows, a.x, a.x.size(0), a.slots.numel(), a.top_k);
}

// ---- the kernels

OptionalTensor contiguous(const OptionalTensor& tensor) {
  return tensor.has_value() ? OptionalTensor(tensor->contiguous()) : std::nullopt;
}

// The arguments in the layout that the kernels read, for as long as the views live.
struct KernelArguments {
  explicit KernelArguments(const Arguments& a)
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

std::tuple<Tensor, Tensor> forward_kernel(const Arguments& a, bool keeps_preactivations) {
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

Gradients backward_kernel(const Tensor& grad_out, const Tensor& preactivations, const OutputMask& wanted,
                          const Arguments& a) {
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

// ---- ATen

std::tuple<Tensor, Tensor> forward_aten(const Arguments& a) {
  const auto type = accumulator_type(a.x.scalar_type());
  const Tensor tokens = ragged_sort(a.x, a.slots, a.rows, a.top_k, std::nullopt);
  const Tensor up = gmm(tokens, a.up, a.group_sizes, a.up_bias, 0);
  const Tensor gate = a.gate.has_value() ? gmm(tokens, *a.gate, a.group_sizes, a.gate_bias, 0) : Tensor();
  const Tensor activated =
      activate(a.kind(), gate.defined() ? gate.to(type) : gate, up.to(type)).activated.to(a.x.scalar_type());
  const Tensor row_outputs = gmm(activated, a.down, a.group_sizes, a.down_bias, 0);
  return {ragged_unsort(row_outputs, a.slots, a.rows, a.top_k, a.weights), gate.defined() ? at::cat({gate, up}, 1) : up};
}

Gradients backward_aten(const Tensor& grad_out, const Tensor& preactivations, const OutputMask& wanted,
                        const Arguments& a) {
  const auto type = accumulator_type(a.x.scalar_type());
  const auto dtype = a.x.scalar_type();
  const int64_t width = a.up.size(2);
  const int64_t num_groups = a.group_sizes.size(0);
  const Tensor none = at::empty({0}, a.x.options());
  const Tensor ones = at::ones({a.slots.size(0), 1}, a.x.options());
  const Tensor z = preactivations.to(type);
  const Tensor gate = a.gate.has_value() ? z.narrow(1, 0, width) : Tensor();
  const ActivatedTensors act = activate(a.kind(), gate, z.narrow(1, z.size(1) - width, width));
  const Tensor scale = a.weights.has_value() ? a.weights->reshape(-1).index_select(0, a.slots).to(type).unsqueeze(1)
                                             : ones.to(type);

  const Tensor grad_y = ragged_sort(grad_out, a.slots, a.rows, a.top_k, std::nullopt);
  const Tensor grad_activated = gmm(grad_y, a.down.transpose(1, 2), a.group_sizes, std::nullopt, 0).to(type);
  const Tensor weighted = scale * grad_activated;
  const Tensor grad_up = (weighted * act.up_slope).to(dtype);
  const Tensor grad_gate = gate.defined() ? (weighted * act.gate_slope).to(dtype) : Tensor();

  Tensor grad_x = none;
  if (wanted[kX]) {
    grad_x = gmm(grad_up, a.up.transpose(1, 2), a.group_sizes, std::nullopt, 0);
    if (gate.defined()) grad_x = grad_x + gmm(grad_gate, a.gate->transpose(1, 2), a.group_sizes, std::nullopt, 0);
    grad_x = ragged_unsort(grad_x, a.slots, a.rows, a.top_k, std::nullopt);
  }
  Tensor grad_weights = at::zeros({wanted[kWeights] ? a.rows.numel() : 0}, a.x.options().dtype(type));
  if (wanted[kWeights]) {
    Tensor of_rows = (grad_activated * act.activated).sum(1);
    if (a.down_bias.has_value()) {
      const Tensor bias = gmm(ones, a.down_bias->unsqueeze(1), a.group_sizes, std::nullopt, 0);
      of_rows = of_rows + (grad_y.to(type) * bias.to(type)).sum(1);
    }
    grad_weights.index_put_({a.slots}, of_rows);
  }
  const Tensor tokens = ragged_sort(a.x, a.slots, a.rows, a.top_k, std::nullopt);
  const auto transposed = [&](Wanted which, const Tensor& lhs, const Tensor& rhs) {
    return wanted[which] ? tgmm(lhs, rhs, a.group_sizes, num_groups, 0) : none;
  };
  const auto summed = [&](Wanted which, const Tensor& lhs, const Tensor& rhs) {
    return wanted[which] ? tgmm(lhs, rhs, a.group_sizes, num_groups, 0).squeeze(1) : none;
  };
  return {grad_x,
          grad_weights,
          transposed(kGate, tokens, grad_gate),
          transposed(kUp, tokens, grad_up),
          transposed(kDown, (scale * act.activated).to(dtype), grad_y),
          summed(kGateBias, ones, grad_gate),
          summed(kUpBias, ones, grad_up),
          summed(kDownBias, scale.to(dtype), grad_y)};
}

// ---- the operators

// The parameters of the schema, and the list of them as arguments.
#define MAXMOE_EXPERT_FFN_PARAMETERS                                                                                  \
  const Tensor &x, const OptionalTensor &weights, const Tensor &slots, const Tensor &rows, const Tensor &group_sizes, \
      int64_t top_k, const OptionalTensor &gate, const Tensor &up, const Tensor &down, const OptionalTensor &gate_bias, \
      const OptionalTensor &up_bias, const OptionalTensor &down_bias, std::string_view activation,                    \
      std::optional<double> limit
#define MAXMOE_EXPERT_FFN_ARGUMENTS \
  x, weights, slots, rows, group_sizes, top_k, gate, up, down, gate_bias, up_bias, down_bias, activation, limit

Arguments make_arguments(MAXMOE_EXPERT_FFN_PARAMETERS) {
  return {x,    weights,   slots,   rows,      group_sizes,            top_k, gate, up,
          down, gate_bias, up_bias, down_bias, std::string(activation), limit};
}

Tensor call_expert_ffn(MAXMOE_EXPERT_FFN_PARAMETERS) {
  static const auto op = find_operator<decltype(call_expert_ffn)>("maxmoe::expert_ffn");
  return op.call(MAXMOE_EXPERT_FFN_ARGUMENTS);
}

std::tuple<Tensor, Tensor> call_forward(MAXMOE_EXPERT_FFN_PARAMETERS) {
  static const auto op = find_operator<decltype(call_forward)>("maxmoe::expert_ffn_forward");
  return op.call(MAXMOE_EXPERT_FFN_ARGUMENTS);
}

Gradients call_backward(const Tensor& grad_out, const Tensor& preactivations, OutputMask output_mask,
                        MAXMOE_EXPERT_FFN_PARAMETERS) {
  static const auto op = find_operator<decltype(call_backward)>("maxmoe::expert_ffn_backward");
  return op.call(grad_out, preactivations, output_mask, MAXMOE_EXPERT_FFN_ARGUMENTS);
}

Tensor expert_ffn_backend(MAXMOE_EXPERT_FFN_PARAMETERS) {
  const Arguments a = make_arguments(MAXMOE_EXPERT_FFN_ARGUMENTS);
  check(a);
  return std::get<0>(uses_kernels(x) ? forward_kernel(a, false) : forward_aten(a));
}

std::tuple<Tensor, Tensor> expert_ffn_forward_backend(MAXMOE_EXPERT_FFN_PARAMETERS) {
  const Arguments a = make_arguments(MAXMOE_EXPERT_FFN_ARGUMENTS);
  check(a);
  return uses_kernels(x) ? forward_kernel(a, true) : forward_aten(a);
}

Gradients expert_ffn_backward_backend(const Tensor& grad_out, const Tensor& preactivations, OutputMask output_mask,
                                      MAXMOE_EXPERT_FFN_PARAMETERS) {
  const Arguments a = make_arguments(MAXMOE_EXPERT_FFN_ARGUMENTS);
  check(a);
  return uses_kernels(x) ? backward_kernel(grad_out, preactivations, output_mask, a)
                         : backward_aten(grad_out, preactivations, output_mask, a);
}

class Gradient : public torch::autograd::Function<Gradient> {
 public:
  static Tensor forward(AutogradContext* ctx, MAXMOE_EXPERT_FFN_PARAMETERS) {
    const at::AutoDispatchBelowADInplaceOrView guard;
    const auto [out, preactivations] = call_forward(MAXMOE_EXPERT_FFN_ARGUMENTS);
    ctx->save_for_backward({x, defined_or_empty(weights), slots, rows, group_sizes, defined_or_empty(gate), up, down,
                            defined_or_empty(gate_bias), defined_or_empty(up_bias), defined_or_empty(down_bias),
                            preactivations});
    ctx->saved_data["top_k"] = top_k;
    ctx->saved_data["activation"] = std::string(activation);
    ctx->saved_data["limit"] = limit;
    ctx->saved_data["wanted"] = c10::List<bool>(
        {x.requires_grad(), requires_grad(weights), requires_grad(gate), up.requires_grad(), down.requires_grad(),
         requires_grad(gate_bias), requires_grad(up_bias), requires_grad(down_bias)});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto optional = [&](size_t index) { return optional_tensor(saved[index]); };
    OutputMask wanted{};
    std::ranges::copy(ctx->saved_data["wanted"].toBoolList().vec(), wanted.begin());
    const auto gradients =
        call_backward(grads[0], saved[11], wanted, saved[0], optional(1), saved[2], saved[3], saved[4],
                      ctx->saved_data["top_k"].toInt(), optional(5), saved[6], saved[7], optional(8), optional(9),
                      optional(10), ctx->saved_data["activation"].toStringRef(),
                      ctx->saved_data["limit"].toOptional<double>());
    const auto [x, weights, gate, up, down, gate_bias, up_bias, down_bias] = gradients;
    const auto or_none = [&](Wanted which, const Tensor& gradient) { return wanted[which] ? gradient : Tensor(); };
    const Tensor of_weights = wanted[kWeights] ? weights.view_as(saved[1]).to(saved[1].scalar_type()) : Tensor();
    return {or_none(kX, x),
            of_weights,
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor(),
            or_none(kGate, gate),
            or_none(kUp, up),
            or_none(kDown, down),
            or_none(kGateBias, gate_bias),
            or_none(kUpBias, up_bias),
            or_none(kDownBias, down_bias),
            Tensor(),
            Tensor()};
  }
};

Tensor expert_ffn_autograd(MAXMOE_EXPERT_FFN_PARAMETERS) {
  const bool any_bias = requires_grad(gate_bias) || requires_grad(up_bias) || requires_grad(down_bias);
  if (needs_gradient(x, up, down) ||
      (at::GradMode::is_enabled() && (requires_grad(weights) || requires_grad(gate) || any_bias))) {
    return Gradient::apply(x, weights, slots, rows, group_sizes, top_k, gate, up, down, gate_bias, up_bias, down_bias,
                           std::string(activation), limit);
  }
  const at::AutoDispatchBelowADInplaceOrView guard;
  return call_expert_ffn(MAXMOE_EXPERT_FFN_ARGUMENTS);
}

// The routing weights stay as they are: they are multiplied in float32.
template <c10::DispatchKey key, c10::DeviceType device>
Tensor expert_ffn_autocast(MAXMOE_EXPERT_FFN_PARAMETERS) {
  const c10::impl::ExcludeDispatchKeyGuard guard(key);
  return call_expert_ffn(autocast(x, device), weights, slots, rows, group_sizes, top_k, autocast(gate, device),
                         autocast(up, device), autocast(down, device), autocast(gate_bias, device),
                         autocast(up_bias, device), autocast(down_bias, device), activation, limit);
}

TORCH_LIBRARY_IMPL(maxmoe, CompositeExplicitAutograd, m) {
  m.impl("expert_ffn", &expert_ffn_backend);
  m.impl("expert_ffn_forward", &expert_ffn_forward_backend);
  m.impl("expert_ffn_backward", &expert_ffn_backward_backend);
}
TORCH_LIBRARY_IMPL(maxmoe, Autograd, m) {
  m.impl("expert_ffn", &expert_ffn_autograd);
  m.impl("expert_ffn_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("expert_ffn_backward", torch::autograd::autogradNotImplementedFallback());
}
TORCH_LIBRARY_IMPL(maxmoe, AutocastCPU, m) {
  m.impl("expert_ffn", &expert_ffn_autocast<c10::DispatchKey::AutocastCPU, c10::kCPU>);
}
TORCH_LIBRARY_IMPL(maxmoe, AutocastCUDA, m) {
  m.impl("expert_ffn", &expert_ffn_autocast<c10::DispatchKey::AutocastCUDA, c10::kCUDA>);
}

}  // namespace
}  // namespace maxmoe::ops
