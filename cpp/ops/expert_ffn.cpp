// Three operators: expert_ffn, which people call; expert_ffn_forward, which also returns what backward needs; and
// expert_ffn_backward, which uses up the preactivations: their memory becomes that of their gradient.
#include "ops/expert_ffn.h"

#include <algorithm>
#include <string_view>

#include "ops/autograd.h"
#include "ops/backend.h"
#include "ops/routed_rows.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kOp = "expert_ffn";

#define MAXMOE_EXPERT_FFN_SCHEMA                                                                        \
  "Tensor x, Tensor? weights, Tensor slots, Tensor rows, Tensor group_sizes, int top_k, Tensor? gate, " \
  "Tensor up, Tensor down, *, Tensor? gate_bias=None, Tensor? up_bias=None, Tensor? down_bias=None, "   \
  "str activation=\"silu\", float? limit=None, str? fused_gate=None"

TORCH_LIBRARY_FRAGMENT(maxmoe, m) {
  m.def("expert_ffn(" MAXMOE_EXPERT_FFN_SCHEMA ") -> Tensor");
  m.def("expert_ffn_forward(" MAXMOE_EXPERT_FFN_SCHEMA ") -> (Tensor out, Tensor preactivations)");
  m.def("expert_ffn_backward(Tensor grad_out, Tensor(a!) preactivations, bool[8] output_mask, " MAXMOE_EXPERT_FFN_SCHEMA
        ") -> (Tensor x, Tensor weights, Tensor gate, Tensor up, Tensor down, Tensor gate_bias, Tensor up_bias, "
        "Tensor down_bias)");
}

void check_up(const char* name, const Tensor& matrices, const Tensor& x, int64_t num_groups, int64_t width) {
  Argument(kOp, name, matrices).has_dims(3, "[L, D, F]").has_dtype_of("x", x).is_on_device_of("x", x);
  Argument(kOp, name, matrices).has_size(0, num_groups, "L of group_sizes").has_size(1, x.size(1), "D of x");
  Argument(kOp, name, matrices).has_size(2, width, "F of up");
}

void check_down(const Tensor& matrices, const Tensor& x, int64_t num_groups, int64_t width) {
  Argument(kOp, "down", matrices).has_dims(3, "[L, F, D]").has_dtype_of("x", x).is_on_device_of("x", x);
  Argument(kOp, "down", matrices).has_size(0, num_groups, "L of group_sizes").has_size(1, width, "F of up");
  Argument(kOp, "down", matrices).has_size(2, x.size(1), "D of x");
}

void check_bias(const char* name, const OptionalTensor& bias, const Tensor& x, int64_t num_groups, int64_t columns,
                const char* meaning) {
  if (!bias.has_value()) return;
  Argument(kOp, name, *bias).has_dims(2, "[L, F], down_bias [L, D]").has_dtype_of("x", x).is_on_device_of("x", x);
  Argument(kOp, name, *bias).has_size(0, num_groups, "L of group_sizes").has_size(1, columns, meaning);
}

void check_fused_gate(const ExpertFfnArguments& a) {
  if (!a.fused_gate.has_value()) return;
  MAXMOE_CHECK(*a.fused_gate == "concatenated" || *a.fused_gate == "interleaved", kOp,
               "fused_gate must be concatenated, interleaved or None, got ", *a.fused_gate);
  MAXMOE_CHECK(!a.gate.has_value(), kOp, "gate must be None with fused_gate ", *a.fused_gate, ", got shape ",
               a.gate->sizes());
  MAXMOE_CHECK(a.up.size(2) % 2 == 0, kOp, "up must be [L, D, 2F] with fused_gate ", *a.fused_gate, ", got shape ",
               a.up.sizes());
}

void check(const ExpertFfnArguments& a) {
  Argument(kOp, "x", a.x).has_dims(2, "[T, D]").is_floating();
  Argument(kOp, "up", a.up).has_dims(3, "[L, D, F]");
  const int64_t hidden_size = a.x.size(1);
  const int64_t width = a.intermediate_size();
  check_fused_gate(a);
  check_group_sizes(kOp, a.group_sizes, a.x, a.slots.numel(), Sum::exactly);
  const int64_t num_groups = a.group_sizes.size(0);
  check_up("up", a.up, a.x, num_groups, a.up.size(2));
  check_down(a.down, a.x, num_groups, width);
  if (a.gate.has_value()) check_up("gate", *a.gate, a.x, num_groups, width);
  MAXMOE_CHECK(a.gate.has_value() || !a.gate_bias.has_value(), kOp, "gate_bias must be None without gate, got shape ",
               a.gate_bias->sizes());
  check_bias("gate_bias", a.gate_bias, a.x, num_groups, width, "F of up");
  check_bias("up_bias", a.up_bias, a.x, num_groups, a.up.size(2), a.fused_gate.has_value() ? "2F of up" : "F of up");
  check_bias("down_bias", a.down_bias, a.x, num_groups, hidden_size, "D of x");
  const ActivationKind kind = a.kind();
  const bool gated = kind.gate != GateLayout::none;
  MAXMOE_CHECK(gated || kind.activation != Activation::swigluoai, kOp,
               "gate must be given for activation swigluoai, got None");
  MAXMOE_CHECK(gated || !a.limit.has_value(), kOp, "limit must be None without gate, got ", a.limit.value_or(0));
  MAXMOE_CHECK(a.limit.value_or(1.0) > 0, kOp, "limit must be positive, got ", a.limit.value_or(1.0));
  check_weights(kOp, a.weights, a.x, a.x.size(0) * a.top_k);
  check_routed_rows(kOp, a.slots, a.rows, a.x, a.x.size(0), a.slots.numel(), a.top_k);
}

// The parameters of the schema, and the list of them as arguments.
#define MAXMOE_EXPERT_FFN_PARAMETERS                                                                                  \
  const Tensor &x, const OptionalTensor &weights, const Tensor &slots, const Tensor &rows, const Tensor &group_sizes, \
      int64_t top_k, const OptionalTensor &gate, const Tensor &up, const Tensor &down,                                \
      const OptionalTensor &gate_bias, const OptionalTensor &up_bias, const OptionalTensor &down_bias,                \
      std::string_view activation, std::optional<double> limit, std::optional<std::string_view> fused_gate
#define MAXMOE_EXPERT_FFN_ARGUMENTS                                                                              \
  x, weights, slots, rows, group_sizes, top_k, gate, up, down, gate_bias, up_bias, down_bias, activation, limit, \
      fused_gate

ExpertFfnArguments make_arguments(MAXMOE_EXPERT_FFN_PARAMETERS) {
  return {x,
          weights,
          slots,
          rows,
          group_sizes,
          top_k,
          gate,
          up,
          down,
          gate_bias,
          up_bias,
          down_bias,
          std::string(activation),
          limit,
          fused_gate.has_value() ? std::optional<std::string>(*fused_gate) : std::nullopt};
}

Tensor call_expert_ffn(MAXMOE_EXPERT_FFN_PARAMETERS) {
  static const auto op = find_operator<decltype(call_expert_ffn)>("maxmoe::expert_ffn");
  return op.call(MAXMOE_EXPERT_FFN_ARGUMENTS);
}

Outputs call_forward(MAXMOE_EXPERT_FFN_PARAMETERS) {
  static const auto op = find_operator<decltype(call_forward)>("maxmoe::expert_ffn_forward");
  return op.call(MAXMOE_EXPERT_FFN_ARGUMENTS);
}

Gradients call_backward(const Tensor& grad_out, const Tensor& preactivations, OutputMask output_mask,
                        MAXMOE_EXPERT_FFN_PARAMETERS) {
  static const auto op = find_operator<decltype(call_backward)>("maxmoe::expert_ffn_backward");
  return op.call(grad_out, preactivations, output_mask, MAXMOE_EXPERT_FFN_ARGUMENTS);
}

Tensor expert_ffn_backend(MAXMOE_EXPERT_FFN_PARAMETERS) {
  const ExpertFfnArguments a = make_arguments(MAXMOE_EXPERT_FFN_ARGUMENTS);
  check(a);
  return std::get<0>(uses_kernels(x) ? expert_ffn_kernel(a, false) : expert_ffn_aten(a));
}

Outputs expert_ffn_forward_backend(MAXMOE_EXPERT_FFN_PARAMETERS) {
  const ExpertFfnArguments a = make_arguments(MAXMOE_EXPERT_FFN_ARGUMENTS);
  check(a);
  return uses_kernels(x) ? expert_ffn_kernel(a, true) : expert_ffn_aten(a);
}

Gradients expert_ffn_backward_backend(const Tensor& grad_out, const Tensor& preactivations, OutputMask output_mask,
                                      MAXMOE_EXPERT_FFN_PARAMETERS) {
  const ExpertFfnArguments a = make_arguments(MAXMOE_EXPERT_FFN_ARGUMENTS);
  check(a);
  MAXMOE_CHECK(grad_out.sizes() == x.sizes(), "expert_ffn_backward", "grad_out must have the shape of x ", x.sizes(),
               ", got ", grad_out.sizes());
  MAXMOE_CHECK(preactivations.dim() == 2 && preactivations.size(0) == slots.size(0) &&
                   preactivations.size(1) == a.preactivation_width(),
               "expert_ffn_backward", "preactivations must be [", slots.size(0), ", ", a.preactivation_width(),
               "], got shape ", preactivations.sizes());
  return uses_kernels(x) ? expert_ffn_backward_kernel(grad_out, preactivations, output_mask, a)
                         : expert_ffn_backward_aten(grad_out, preactivations, output_mask, a);
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
    ctx->saved_data["fused_gate"] = fused_gate.has_value() ? c10::IValue(std::string(*fused_gate)) : c10::IValue();
    ctx->saved_data["wanted"] = c10::List<bool>({x.requires_grad(), requires_grad(weights), requires_grad(gate),
                                                 up.requires_grad(), down.requires_grad(), requires_grad(gate_bias),
                                                 requires_grad(up_bias), requires_grad(down_bias)});
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const auto saved = ctx->get_saved_variables();
    const auto optional = [&](size_t index) { return optional_tensor(saved[index]); };
    OutputMask wanted{};
    std::ranges::copy(ctx->saved_data["wanted"].toBoolList().vec(), wanted.begin());
    const bool may_come_again = torch::autograd::get_current_graph_task_keep_graph();  // retain_graph
    const Tensor preactivations = may_come_again ? saved[11].clone() : saved[11];
    const auto gradients = call_backward(
        grads[0], preactivations, wanted, saved[0], optional(1), saved[2], saved[3], saved[4],
        ctx->saved_data["top_k"].toInt(), optional(5), saved[6], saved[7], optional(8), optional(9), optional(10),
        ctx->saved_data["activation"].toStringRef(), ctx->saved_data["limit"].toOptional<double>(),
        ctx->saved_data["fused_gate"].toOptional<std::string_view>());
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
            Tensor(),
            Tensor()};
  }
};

Tensor expert_ffn_autograd(MAXMOE_EXPERT_FFN_PARAMETERS) {
  const bool any_bias = requires_grad(gate_bias) || requires_grad(up_bias) || requires_grad(down_bias);
  if (needs_gradient(x, up, down) ||
      (at::GradMode::is_enabled() && (requires_grad(weights) || requires_grad(gate) || any_bias))) {
    return Gradient::apply(x, weights, slots, rows, group_sizes, top_k, gate, up, down, gate_bias, up_bias, down_bias,
                           std::string(activation), limit, fused_gate);
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
                         autocast(up_bias, device), autocast(down_bias, device), activation, limit, fused_gate);
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
