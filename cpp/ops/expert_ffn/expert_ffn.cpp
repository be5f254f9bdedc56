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

#include <torch/csrc/autograd/autograd.h>

#include "ops/activation.h"
#include "ops/backend.h"
#include "ops/operators.h"
#include "ops/registration.h"
#include "ops/views.h"

namespace maxmoe::ops {
namespace {

// The name in the messages of expert_ffn_forward as well, because users call only expert_ffn.
constexpr const char* kExpertFfn = "expert_ffn";

const std::string kSchema = "Tensor x, Tensor? weights, Tensor slots, Tensor rows, Tensor group_sizes, int top_k, *, " +
                            Projection::schema("gate") + ", " + Projection::schema("up") + ", " +
                            Projection::schema("down") + ", " + ActivationArguments::kSchema +
                            ", str? fused_gate=None, bool recompute=False";

using GradientTuple = decltype(std::tuple_cat(std::declval<Gradients>().in_order()));

constexpr Operator<"expert_ffn_forward", Signature<Outputs, ExpertFfnArguments>> expert_ffn_forward;
using OutputMask = std::array<bool, Wanted::kSize>;
constexpr Operator<"expert_ffn_backward", Signature<GradientTuple, ExpertFfnArguments, const Tensor&, const Tensor&,
                                                    const Tensor&, const Tensor&, OutputMask>>
    expert_ffn_backward;

template <class... Arguments>
Tensor expert_ffn_backend(Arguments... arguments) {
  const ExpertFfnArguments a{arguments...};
  check_expert_ffn(kExpertFfn, a);
  return uses_kernels(a.x) ? expert_ffn_kernel(a, nullptr) : std::get<0>(expert_ffn_aten(a, false));
}

template <class... Arguments>
Outputs expert_ffn_forward_backend(Arguments... arguments) {
  const ExpertFfnArguments a{arguments...};
  check_expert_ffn(kExpertFfn, a);
  if (!uses_kernels(a.x)) return expert_ffn_aten(a, !a.recompute);
  const Intermediates kept = empty_intermediates(a.num_kept_rows(), a);
  const Tensor out = expert_ffn_kernel(a, a.recompute ? nullptr : &kept);
  return {out, kept.preactivations, kept.reduced, kept.gate};
}

template <class... Arguments>
GradientTuple expert_ffn_backward_backend(const Tensor& grad_out, const Tensor& preactivations, const Tensor& reduced,
                                          const Tensor& gate, OutputMask output_mask, Arguments... arguments) {
  const ExpertFfnArguments a{arguments...};
  const Wanted wanted = Wanted::from(output_mask);
  const Intermediates rows{preactivations, reduced, gate};
  check_expert_ffn_backward(grad_out, rows, wanted, a);
  const auto kept = a.recompute ? std::nullopt : std::optional(rows);
  const Gradients gradients = uses_kernels(a.x) ? expert_ffn_backward_kernel(grad_out, kept, wanted, a)
                                                : expert_ffn_backward_aten(grad_out, kept, wanted, a);
  return std::tuple_cat(gradients.in_order());
}

// expert_ffn as a composition of operators that are differentiable any number of times, for second derivatives and
// forward-mode AD.
Tensor compose_expert_ffn(const ExpertFfnArguments& a) {
  // Wider than 16 bits, because rounding after every elementwise operation makes second derivatives inaccurate.
  const auto type = accumulator_type(a.x.scalar_type());
  const Tensor tokens = ragged_sort(a.x, a.slots, a.rows, a.top_k, std::nullopt);
  const auto project = [&](const Projection& projection) { return gmm(tokens, projection, a.group_sizes, 0).to(type); };
  const auto [gate, up] =
      a.gate.is_given() ? std::pair(project(a.gate), project(a.up)) : gate_and_up(a.gate_layout(), project(a.up));
  const Tensor activated = activated_rows(a.kind(), gate, up).to(a.x.scalar_type());
  return ragged_gather_reduce(gmm(activated, a.down, a.group_sizes, 0), a.rows, a.top_k, a.weights, std::nullopt);
}

// The gradients of the composition, in the order of PerInput, undefined where they are not wanted. If autograd is
// enabled, they are differentiable.
variable_list differentiate_composition(const Tensor& grad_out, ExpertFfnArguments a, const OutputMask& output_mask) {
  const bool creates_graph = at::GradMode::is_enabled();
  const at::AutoGradMode enabled(true);
  variable_list inputs;
  size_t position = 0;
  // Gradients are taken of aliases, because an argument may have been computed from another one: the weights from x.
  const auto replace = [&](auto& input) {
    if (!output_mask[position++]) return;
    inputs.push_back(tensor_or_null(input)->view_as(*tensor_or_null(input)));
    input = inputs.back();
  };
  std::apply([&](auto&... fields) { (replace(fields), ...); }, ExpertFfnArguments::differentiable(a));
  const variable_list wanted = torch::autograd::grad(
      {compose_expert_ffn(a)}, inputs, {grad_out}, /*retain_graph=*/std::nullopt, creates_graph, /*allow_unused=*/true);
  variable_list gradients(output_mask.size());
  auto next = wanted.begin();
  for (size_t input = 0; input < gradients.size(); ++input) {
    if (output_mask[input]) gradients[input] = *next++;
  }
  return gradients;
}

// `inputs` are the arguments that may have a gradient, in the order of PerInput.
class ExpertFfnNode : public torch::autograd::Function<ExpertFfnNode> {
 public:
  static Tensor forward(AutogradContext* ctx, const ExpertFfnArguments& a, const auto&... /*inputs*/) {
    const auto [out, preactivations, reduced, gate] = call(expert_ffn_forward, a);
    save_arguments(ctx, ExpertFfnArguments::fields(a),
                   {preactivations, a.reduced_width() > 0 ? reduced : Tensor(), a.gate_width() > 0 ? gate : Tensor()});
    ctx->saved_data["uses_kernels"] = uses_kernels(a.x);
    return out;
  }

  static variable_list backward(AutogradContext* ctx, const variable_list& grads) {
    const OperatorCall running;
    ExpertFfnArguments a;
    const variable_list saved = load_arguments(ctx, ExpertFfnArguments::fields(a));
    // Tensors without columns are not saved.
    const auto saved_or_empty = [&](size_t i) { return saved[i].defined() ? saved[i] : without_columns(saved[0]); };
    Intermediates kept{saved[0], saved_or_empty(1), saved_or_empty(2)};
    // Kernels store gate and up side by side, ATen one after the other; force_aten may have been called since.
    if (a.gate.is_given() && ctx->saved_data["uses_kernels"].toBool() != uses_kernels(a.x)) {
      a.recompute = true;
      kept = {kept.preactivations.narrow(0, 0, 0), kept.reduced.narrow(0, 0, 0), kept.gate.narrow(0, 0, 0)};
    }
    const OutputMask output_mask = wanted_gradients(ctx, ExpertFfnArguments::differentiable(a));
    variable_list result = is_transformed(grads[0]) ? differentiate_composition(grads[0], a, output_mask)
                                                    : run_backward(kept, grads[0], a, output_mask);
    result.insert(result.begin(), Tensor());  // for `a`
    return result;
  }

 private:
  static variable_list run_backward(const Intermediates& kept, const Tensor& grad_out, const ExpertFfnArguments& a,
                                    const OutputMask& output_mask) {
    const Wanted wanted = Wanted::from(output_mask);
    // expert_ffn_backward overwrites the preactivations, which another backward pass of this graph would read.
    const bool is_copied = torch_internals::keeps_graph() && needs_grad_activated(wanted);
    const auto overwritten = [&](const Tensor& tensor) { return is_copied ? tensor.clone() : tensor; };
    const GradientTuple gradients = call(expert_ffn_backward, a, grad_out, overwritten(kept.preactivations),
                                         kept.reduced, overwritten(kept.gate), output_mask);
    variable_list result = std::apply([](const auto&... gradient) { return variable_list{gradient...}; }, gradients);
    if (wanted.weights) result[1] = like_weights(result[1], *a.weights);
    for (size_t input = 0; input < result.size(); ++input) {
      if (!output_mask[input]) result[input] = Tensor();
    }
    return result;
  }
};

struct ExpertFfnGradient {
  static Tensor apply(const auto&... arguments) {
    const ExpertFfnArguments a{arguments...};
    check_is_frozen(a);
    return std::apply([&](const auto&... inputs) { return ExpertFfnNode::apply(a, inputs...); },
                      ExpertFfnArguments::differentiable(a));
  }

  static Tensor with_tangents(const auto&... arguments) {
    const ExpertFfnArguments a{arguments...};
    check_is_frozen(a);
    check_expert_ffn_shapes(kExpertFfn, a);
    return compose_expert_ffn(a);
  }

 private:
  static void check_is_frozen(const ExpertFfnArguments& a) {
    ops::check_is_frozen(kExpertFfn, "gate", a.gate);
    ops::check_is_frozen(kExpertFfn, "up", a.up);
    ops::check_is_frozen(kExpertFfn, "down", a.down);
  }
};

TORCH_LIBRARY_FRAGMENT(maxmoe, library) {
  define<expert_ffn, expert_ffn_backend, ExpertFfnGradient, Autocast::lower_precision>(
      library, "expert_ffn(" + kSchema + ") -> Tensor");
  define<expert_ffn_forward, expert_ffn_forward_backend>(
      library,
      "expert_ffn_forward(" + kSchema + ") -> (Tensor out, Tensor preactivations, Tensor reduced, Tensor gate)");
  define<expert_ffn_backward, expert_ffn_backward_backend>(
      library,
      "expert_ffn_backward(Tensor grad_out, Tensor(a!) preactivations, Tensor reduced, Tensor(b!) gate_preactivations, "
      "bool[14] output_mask, " +
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
  return activation.kind(kExpertFfn, gate_layout(), x.scalar_type());
}

}  // namespace maxmoe::ops
