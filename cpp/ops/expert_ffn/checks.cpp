// The checks of the arguments of expert_ffn. The messages of expert_ffn_forward name expert_ffn as well, because users
// call only that.
#include "ops/activation.h"
#include "ops/autograd.h"
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
  a.activation.check(op, a.gate_layout());
}

void check_intermediate(const char* name, const Tensor& rows, const char* shape, int64_t width, const char* meaning,
                        const ExpertFfnArguments& a) {
  Argument(kExpertFfnBackward, name, rows)
      .has_shape(shape, {{a.num_kept_rows(), a.recompute ? "recompute" : "R of slots"}, {width, meaning}})
      .has_dtype_of("x", a.x);
}

}  // namespace

void check_expert_ffn_shapes(const char* op, const ExpertFfnArguments& a) {
  Argument(op, "x", a.x).has_dims(2, "[T, D]").is_floating();
  for (const auto& [name, projection] : {std::pair("up", &a.up), std::pair("down", &a.down)}) {
    MAXMOE_CHECK(projection->is_given(), op, name, " must be given, got None");
  }
  Argument(op, "up", *a.up.tensor).has_dims(3, a.up.format.has_value() ? "[L, F, bytes]" : "[L, D, F]");
  Argument(op, "group_sizes", a.group_sizes).has_dims(1, "[G]");
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
  Argument(kExpertFfnBackward, "grad_out", grad_out)
      .has_shape("[T, D]", {{a.x.size(0), "T of x"}, {a.x.size(1), "D of x"}})
      .has_dtype_of("x", a.x);
  check_intermediate("preactivations", kept.preactivations, "[R, 2F] or [R, F]", a.preactivation_width(),
                     "width of gate and up", a);
  check_intermediate("gate_preactivations", kept.gate, "[R, F] or [R, 0]", a.gate_width(), "width of a gate apart", a);
  check_intermediate("reduced", kept.reduced, "[R, r]", a.reduced_width(), "r of gate, up and down", a);
  const auto check_wanted = [&](bool is_wanted, const char* name, const OptionalTensor& input) {
    MAXMOE_CHECK(!is_wanted || tensor_or_null(input) != nullptr, kExpertFfnBackward, "output_mask must be False for ",
                 name, ", which is None, got True");
  };
  check_wanted(wanted.weights, "weights", a.weights);
  for (const auto& [names, p, of] : {std::tuple(kGate, &a.gate, wanted.gate), std::tuple(kUp, &a.up, wanted.up),
                                     std::tuple(kDown, &a.down, wanted.down)}) {
    MAXMOE_CHECK(!of.weights || !p->is_quantized(), kExpertFfnBackward, "output_mask must be False for ", names.tensor,
                 ", which is quantized (", p->format.value_or(""), "), got True");
    check_wanted(of.weights, names.tensor, p->tensor);
    check_wanted(of.bias, names.bias, p->bias);
    check_wanted(of.a, names.a, p->a);
    check_wanted(of.b, names.b, p->b);
  }
}

}  // namespace maxmoe::ops
