// Three operators. Users call expert_ffn. Under autograd it calls expert_ffn_forward, which also returns the
// preactivations and the reduced rows of low-rank factors, and later expert_ffn_backward, which overwrites the
// preactivations with their gradient. With `recompute` expert_ffn_forward returns neither and expert_ffn_backward
// computes them.
//
// In a split backward pass, first for x and weights and then for the parameters, each product that is a gradient runs
// once. Both passes need the gradient of the preactivations, so that the product with down^T before it runs in both: 7
// products of [R, D, F] instead of 6 for gated experts, 5 instead of 4 without a gate. With `recompute` both also
// compute the preactivations: 11 instead of 8, 7 instead of 5. Keeping the gradient of the activations [R, F] between
// the passes would save the product, but hold half as much memory again as the preactivations of gated experts.
#include "ops/expert_ffn/expert_ffn.h"

#include <ATen/ops/empty.h>

#include "ops/backend.h"

namespace maxmoe::ops {
namespace {

// The name in the messages of expert_ffn_forward as well, because users call only expert_ffn.
constexpr const char* kExpertFfn = "expert_ffn";

const std::string kSchema = "Tensor x, Tensor? weights, Tensor slots, Tensor rows, Tensor group_sizes, int top_k, *, " +
                            Projection::schema("gate") + ", " + Projection::schema("up") + ", " +
                            Projection::schema("down") +
                            ", str activation=\"silu\", float? limit=None, str? fused_gate=None, bool recompute=False";

using GradientTuple = decltype(std::tuple_cat(std::declval<Gradients>().in_order()));

constexpr Operator<"expert_ffn_forward", ExpertFfnSignature<Outputs>> expert_ffn_forward;
using OutputMask = std::array<bool, Wanted::kSize>;
constexpr Operator<"expert_ffn_backward",
                   ExpertFfnSignature<GradientTuple, const Tensor&, const Tensor&, const Tensor&, OutputMask>>
    expert_ffn_backward;

template <class... Arguments>
Tensor expert_ffn_backend(Arguments... arguments) {
  const ExpertFfnArguments a{arguments...};
  check_expert_ffn(kExpertFfn, a);
  return std::get<0>(uses_kernels(a.x) ? expert_ffn_kernel(a, false) : expert_ffn_aten(a, Differentiable::no, false));
}

template <class... Arguments>
Outputs expert_ffn_forward_backend(Arguments... arguments) {
  const ExpertFfnArguments a{arguments...};
  check_expert_ffn(kExpertFfn, a);
  return uses_kernels(a.x) ? expert_ffn_kernel(a, !a.recompute) : expert_ffn_aten(a, Differentiable::no, !a.recompute);
}

template <class... Arguments>
GradientTuple expert_ffn_backward_backend(const Tensor& grad_out, const Tensor& preactivations, const Tensor& reduced,
                                          OutputMask output_mask, Arguments... arguments) {
  const ExpertFfnArguments a{arguments...};
  const Wanted wanted = Wanted::from(output_mask);
  const Intermediates rows{preactivations, reduced};
  check_expert_ffn_backward(grad_out, rows, wanted, a);
  const auto kept = a.recompute ? std::nullopt : std::optional(rows);
  const Gradients gradients = uses_kernels(a.x)
                                  ? expert_ffn_backward_kernel(grad_out, kept, wanted, a)
                                  : expert_ffn_backward_aten(grad_out, kept, wanted, a, Differentiable::no);
  return std::tuple_cat(gradients.in_order());
}

// The preactivations of a gate in matrices of its own, for the path that backward takes. Kernels store gate and up side
// by side, ATen one after the other; force_aten may have been called since the forward pass.
Tensor for_path(const Tensor& preactivations, bool from_kernels, bool to_kernels) {
  if (from_kernels == to_kernels) return preactivations;
  const int64_t num_rows = preactivations.size(0);
  const int64_t width = preactivations.size(1) / 2;
  const Tensor parts =
      from_kernels ? preactivations.view({num_rows, 2, width}) : preactivations.view({2, num_rows, width});
  return parts.transpose(0, 1).contiguous().view_as(preactivations);
}

// `inputs` are the arguments that may have a gradient, in the order of PerInput: torch::autograd::Function finds only
// the tensors that are its own parameters, not the tensors of a struct.
class ExpertFfnNode : public torch::autograd::Function<ExpertFfnNode> {
 public:
  static Tensor forward(AutogradContext* ctx, const ExpertFfnArguments& a, const auto&... /*inputs*/) {
    const auto [out, preactivations, reduced] = call(expert_ffn_forward, a);
    save_arguments(ctx, ExpertFfnArguments::fields(a), {preactivations, a.reduced_width() > 0 ? reduced : Tensor()});
    ctx->saved_data["uses_kernels"] = uses_kernels(a.x);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    ExpertFfnArguments a;
    const Intermediates kept = load(ctx, a);
    const OutputMask output_mask = wanted_gradients(ctx, a.differentiable());
    const Wanted wanted = Wanted::from(output_mask);
    Gradients gradients;
    if (is_transformed(grads[0])) {
      gradients = expert_ffn_backward_aten(grads[0], std::nullopt, wanted, a, Differentiable::yes);
    } else {
      // expert_ffn_backward overwrites the preactivations, which another backward pass of this graph would read.
      const bool is_copied = torch_internals::keeps_graph() && needs_grad_activated(wanted);
      Tensor overwritten = is_copied ? kept.preactivations.clone() : kept.preactivations;
      if (a.gate.is_given()) {
        overwritten = for_path(overwritten, ctx->saved_data["uses_kernels"].toBool(), uses_kernels(a.x));
      }
      gradients =
          Gradients::from(std::apply([](const auto&... gradient) { return std::array{gradient...}; },
                                     call(expert_ffn_backward, a, grads[0], overwritten, kept.reduced, output_mask)));
    }
    if (wanted.weights) gradients.weights = like_weights(gradients.weights, *a.weights);
    variable_list result{Tensor()};  // for `a`
    const auto in_order = gradients.in_order();
    for (size_t input = 0; input < in_order.size(); ++input) {
      result.push_back(output_mask[input] ? in_order[input] : Tensor());
    }
    return result;
  }

 private:
  static Intermediates load(AutogradContext* ctx, ExpertFfnArguments& a) {
    const variable_list kept = load_arguments(ctx, ExpertFfnArguments::fields(a));
    // Without factors no reduced rows are saved.
    const Tensor& preactivations = kept[0];
    if (kept[1].defined()) return {preactivations, kept[1]};
    return {preactivations, at::empty_symint({preactivations.sym_size(0), 0}, preactivations.options())};
  }
};

struct ExpertFfnGradient {
  static Tensor apply(const auto&... arguments) {
    const ExpertFfnArguments a{arguments...};
    check_is_frozen(a);
    return std::apply([&](const auto&... inputs) { return ExpertFfnNode::apply(a, inputs...); }, a.differentiable());
  }

  static Tensor with_tangents(const auto&... arguments) {
    const ExpertFfnArguments a{arguments...};
    check_is_frozen(a);
    check_expert_ffn_shapes(kExpertFfn, a);
    return std::get<0>(expert_ffn_aten(a, Differentiable::yes, false));
  }

 private:
  static void check_is_frozen(const ExpertFfnArguments& a) {
    ops::check_is_frozen(kExpertFfn, "gate", a.gate.scales);
    ops::check_is_frozen(kExpertFfn, "up", a.up.scales);
    ops::check_is_frozen(kExpertFfn, "down", a.down.scales);
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  expert_ffn.define<expert_ffn_backend, ExpertFfnGradient, Autocast::lower_precision>(
      library, "expert_ffn(" + kSchema + ") -> Tensor");
  expert_ffn_forward.define<expert_ffn_forward_backend>(
      library, "expert_ffn_forward(" + kSchema + ") -> (Tensor out, Tensor preactivations, Tensor reduced)");
  expert_ffn_backward.define<expert_ffn_backward_backend>(
      library,
      "expert_ffn_backward(Tensor grad_out, Tensor(a!) preactivations, Tensor reduced, bool[14] output_mask, " +
          kSchema +
          ") -> (Tensor x, Tensor weights, Tensor gate, Tensor gate_bias, Tensor gate_a, Tensor gate_b, Tensor up, "
          "Tensor up_bias, Tensor up_a, Tensor up_b, Tensor down, Tensor down_bias, Tensor down_a, Tensor down_b)");
}

}  // namespace

GateLayout ExpertFfnArguments::gate_layout() const {
  if (!fused_gate.has_value()) return gate.is_given() ? GateLayout::separate : GateLayout::none;
  return *fused_gate == "interleaved" ? GateLayout::interleaved : GateLayout::concatenated;
}

ActivationKind ExpertFfnArguments::kind() const {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  const bool is_double = x.scalar_type() == at::kDouble;
  const double largest = is_double ? std::numeric_limits<double>::max() : std::numeric_limits<float>::max();
  const double bound = limit.value_or(infinity);
  return {parse_activation(kExpertFfn, activation), gate_layout(), bound > largest ? infinity : bound};
}

}  // namespace maxmoe::ops
