// The checks of the arguments of expert_ffn. The messages of expert_ffn_forward name expert_ffn as well, because users
// call only that.
#include "ops/backend.h"
#include "ops/expert_ffn/expert_ffn.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kExpertFfnBackward = "expert_ffn_backward";

constexpr ProjectionNames kGate{"gate", "gate_bias", "gate_a", "gate_b"};
constexpr ProjectionNames kUp{"up", "up_bias", "up_a", "up_b"};
constexpr ProjectionNames kDown{"down", "down_bias", "down_a", "down_b"};

void check_gate(const char* op, const ExpertFfnArguments& a) {
  if (a.fused_gate.has_value()) {
    MAXMOE_CHECK(*a.fused_gate == "concatenated" || *a.fused_gate == "interleaved", op,
                 "fused_gate must be concatenated, interleaved or None, got ", *a.fused_gate);
    MAXMOE_CHECK(!a.gate.is_given(), op, "gate must be None with fused_gate ", *a.fused_gate, ", got shape ",
                 a.gate.tensor->sizes());
    MAXMOE_CHECK(a.up_width() % 2 == 0, op, "up must be [L, D, 2F] with fused_gate ", *a.fused_gate, ", got shape ",
                 a.up.tensor->sizes());
  }
  if (!a.gate.is_given()) check_no_projection(op, kGate, a.gate);
  const bool gated = a.gate_layout() != GateLayout::none;
  MAXMOE_CHECK(gated || parse_activation(op, a.activation) != Activation::swigluoai, op,
               "gate must be given for activation swigluoai, got None");
  MAXMOE_CHECK(gated || !a.limit.has_value(), op, "limit must be None without gate, got ", a.limit.value_or(0));
  MAXMOE_CHECK(a.limit.value_or(1.0) > 0, op, "limit must be positive, got ", a.limit.value_or(1.0));
}

void check_intermediate(const char* name, const Tensor& rows, const char* shape, int64_t width, const char* meaning,
                        const ExpertFfnArguments& a) {
  Argument(kExpertFfnBackward, name, rows).has_dims(2, shape).has_dtype_of("x", a.x);
  Argument(kExpertFfnBackward, name, rows).has_size(0, a.num_kept_rows(), a.recompute ? "recompute" : "R of slots");
  Argument(kExpertFfnBackward, name, rows).has_size(1, width, meaning);
}

}  // namespace

void check_expert_ffn_shapes(const char* op, const ExpertFfnArguments& a) {
  Argument(op, "x", a.x).has_dims(2, "[T, D]").is_floating();
  for (const auto& [name, projection] : {std::pair("up", &a.up), std::pair("down", &a.down)}) {
    MAXMOE_CHECK(projection->is_given(), op, name, " must be given, got None");
  }
  Argument(op, "up", *a.up.tensor).has_dims(3, a.up.format.has_value() ? "[L, F, bytes]" : "[L, D, F]");
  Argument(op, "group_sizes", a.group_sizes).has_dims(1, "[G]");
  parse_activation(op, a.activation);
  check_gate(op, a);
  const Size count{a.group_sizes.size(0), "L of group_sizes"};
  const Size hidden{a.x.size(1), "D of x"};
  const Size width{a.intermediate_size(), "F of up"};
  const Size up_width{a.up_width(), a.fused_gate.has_value() ? "2F of up" : "F of up"};
  constexpr const char* kShape = "[L, D, F], down [L, F, D]";
  check_projection(op, kUp, a.up, "x", a.x, kShape, count, hidden, up_width);
  check_projection(op, kDown, a.down, "x", a.x, kShape, count, width, hidden);
  if (a.gate.is_given()) check_projection(op, kGate, a.gate, "x", a.x, kShape, count, hidden, width);
}

void check_expert_ffn(const char* op, const ExpertFfnArguments& a) {
  check_expert_ffn_shapes(op, a);
  check_group_sizes(op, a.group_sizes, a.slots.numel(), uses_kernels(a.x) ? Sum::exactly : Sum::at_most);
  check_weights(op, a.weights, checked_product(op, "top_k", a.x.size(0), a.top_k));
  check_routed_rows(op, a.slots, a.rows, a.x.size(0), a.slots.numel(), a.top_k);
}

void check_expert_ffn_backward(const Tensor& grad_out, const Intermediates& kept, const Wanted& wanted,
                               const ExpertFfnArguments& a) {
  check_expert_ffn(kExpertFfnBackward, a);
  Argument(kExpertFfnBackward, "grad_out", grad_out).has_dims(2, "[T, D]").has_dtype_of("x", a.x);
  Argument(kExpertFfnBackward, "grad_out", grad_out)
      .has_size(0, a.x.size(0), "T of x")
      .has_size(1, a.x.size(1), "D of x");
  check_intermediate("preactivations", kept.preactivations, "[R, 2F] or [R, F]", a.preactivation_width(),
                     "width of gate and up", a);
  check_intermediate("reduced", kept.reduced, "[R, r]", a.reduced_width(), "r of gate, up and down", a);
  const auto check_wanted = [](const char* name, bool is_wanted, bool is_given) {
    MAXMOE_CHECK(!is_wanted || is_given, kExpertFfnBackward, "output_mask must be False for ", name,
                 ", which is None, got True");
  };
  check_wanted("weights", wanted.weights, a.weights.has_value());
  const auto check_projection = [&](const ProjectionNames& names, const Projection& p, const PerTensor<bool>& of) {
    MAXMOE_CHECK(!of.weights || !p.format.has_value(), kExpertFfnBackward, "output_mask must be False for ",
                 names.tensor, ", which is quantized (", p.format.value_or(""), "), got True");
    check_wanted(names.tensor, of.weights, p.is_given());
    check_wanted(names.bias, of.bias, p.bias.has_value());
    check_wanted(names.a, of.a, p.a.has_value());
    check_wanted(names.b, of.b, p.b.has_value());
  };
  check_projection(kGate, a.gate, wanted.gate);
  check_projection(kUp, a.up, wanted.up);
  check_projection(kDown, a.down, wanted.down);
}

}  // namespace maxmoe::ops
