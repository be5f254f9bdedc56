// The checks of the arguments of expert_ffn. The messages of expert_ffn_forward name expert_ffn as well, because users
// call only that.
#include "ops/backend.h"
#include "ops/expert_ffn.h"

namespace maxmoe::ops {
namespace {

constexpr const char* kExpertFfnBackward = "expert_ffn_backward";

struct Size {
  int64_t size;
  const char* meaning;
};

// Checks a parameter of the L experts: [L, sizes...].
void check_parameter(const Argument& parameter, const char* shape, const ExpertFfnArguments& a,
                     std::initializer_list<Size> sizes) {
  parameter.has_dims(static_cast<int64_t>(sizes.size()) + 1, shape).has_dtype_of("x", a.x);
  parameter.has_size(0, a.group_sizes.size(0), "L of group_sizes");
  int64_t dim = 0;
  for (const auto& [size, meaning] : sizes) parameter.has_size(++dim, size, meaning);
}

void check_gate(const char* op, const ExpertFfnArguments& a) {
  if (a.fused_gate.has_value()) {
    MAXMOE_CHECK(*a.fused_gate == "concatenated" || *a.fused_gate == "interleaved", op,
                 "fused_gate must be concatenated, interleaved or None, got ", *a.fused_gate);
    MAXMOE_CHECK(!a.gate.has_value(), op, "gate must be None with fused_gate ", *a.fused_gate, ", got shape ",
                 a.gate->sizes());
    MAXMOE_CHECK(a.up_width() % 2 == 0, op, "up must be [L, D, 2F] with fused_gate ", *a.fused_gate, ", got shape ",
                 a.up.sizes());
  }
  MAXMOE_CHECK(a.gate.has_value() || !a.gate_bias.has_value(), op, "gate_bias must be None without gate, got shape ",
               a.gate_bias->sizes());
  const bool gated = a.gate_layout() != GateLayout::none;
  MAXMOE_CHECK(gated || parse_activation(op, a.activation) != Activation::swigluoai, op,
               "gate must be given for activation swigluoai, got None");
  MAXMOE_CHECK(gated || !a.limit.has_value(), op, "limit must be None without gate, got ", a.limit.value_or(0));
  MAXMOE_CHECK(a.limit.value_or(1.0) > 0, op, "limit must be positive, got ", a.limit.value_or(1.0));
}

// Checks the matrices of the L experts: [L, in, out].
void check_matrices(const char* op, const char* name, const Weights& weights, Size rows, Size columns,
                    const ExpertFfnArguments& a) {
  constexpr const char* kShape = "[L, D, F], down [L, F, D]";
  if (!weights.is_quantized()) check_parameter(Argument(op, name, weights.tensor), kShape, a, {rows, columns});
  check_weights(op, name, kShape, weights);
  if (!weights.is_quantized()) return;
  Argument(op, name, weights.tensor).has_size(0, a.group_sizes.size(0), "L of group_sizes");
  Argument(op, name, weights.tensor).has_size(1, columns.size, columns.meaning);
}

// Checks the low-rank factors of matrices [L, in, out].
void check_factors(const char* op, const std::array<const char*, 3>& names, const std::optional<Weights>& matrices,
                   const Factors& factors, const ExpertFfnArguments& a) {
  const auto [name, name_a, name_b] = names;
  MAXMOE_CHECK(factors.a.has_value() == factors.b.has_value(), op, factors.a.has_value() ? name_b : name_a,
               " must be given with ", factors.a.has_value() ? name_a : name_b, ", got None");
  if (!factors.are_given()) return;
  MAXMOE_CHECK(matrices.has_value(), op, name_a, " must be None without ", name, ", got shape ", factors.a->sizes());
  // rank() reads the last of three dims.
  const Argument reduce(op, name_a, *factors.a);
  reduce.has_dims(3, "[L, in, r]");
  check_parameter(reduce, "[L, in, r]", a,
                  {{matrices->in_size(), "inner size of the matrices"}, {factors.rank(), "r"}});
  check_parameter(Argument(op, name_b, *factors.b), "[L, r, out]", a,
                  {{factors.rank(), "r of the other factor"}, {matrices->out_size(), "outer size of the matrices"}});
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
  Argument(op, "up", a.up).has_dims(3, a.up_format.has_value() ? "[L, F, bytes]" : "[L, D, F]");
  Argument(op, "group_sizes", a.group_sizes).has_dims(1, "[G]");
  parse_activation(op, a.activation);
  check_gate(op, a);
  const Size hidden{a.x.size(1), "D of x"};
  const Size width{a.intermediate_size(), "F of up"};
  const auto check_bias = [&](const char* name, const OptionalTensor& bias, Size columns) {
    if (bias.has_value()) check_parameter(Argument(op, name, *bias), "[L, F], down_bias [L, D]", a, {columns});
  };
  check_matrices(op, "up", a.up_weights(), hidden, {a.up_width(), "F of up"}, a);
  check_matrices(op, "down", a.down_weights(), width, hidden, a);
  if (a.gate.has_value()) check_matrices(op, "gate", a.gate_weights(), hidden, width, a);
  check_bias("gate_bias", a.gate_bias, width);
  check_bias("up_bias", a.up_bias, {a.up_width(), a.fused_gate.has_value() ? "2F of up" : "F of up"});
  check_bias("down_bias", a.down_bias, hidden);
  const auto gate = a.gate.has_value() ? std::optional(a.gate_weights()) : std::nullopt;
  check_factors(op, {"gate", "gate_a", "gate_b"}, gate, a.gate_factors(), a);
  check_factors(op, {"up", "up_a", "up_b"}, a.up_weights(), a.up_factors(), a);
  check_factors(op, {"down", "down_a", "down_b"}, a.down_weights(), a.down_factors(), a);
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
  const auto is_given = [](const char* name, bool is_wanted, const OptionalTensor& argument) {
    MAXMOE_CHECK(!is_wanted || argument.has_value(), kExpertFfnBackward, "output_mask must be False for ", name,
                 ", which is None, got True");
  };
  const auto is_differentiable = [](const char* name, bool is_wanted, const std::optional<std::string_view>& format) {
    MAXMOE_CHECK(!is_wanted || !format.has_value(), kExpertFfnBackward, "output_mask must be False for ", name,
                 ", which is quantized (", format.value_or(""), "), got True");
  };
  is_differentiable("gate", wanted.gate, a.gate_format);
  is_differentiable("up", wanted.up, a.up_format);
  is_differentiable("down", wanted.down, a.down_format);
  is_given("weights", wanted.weights, a.weights);
  is_given("gate", wanted.gate, a.gate);
  is_given("gate_bias", wanted.gate_bias, a.gate_bias);
  is_given("up_bias", wanted.up_bias, a.up_bias);
  is_given("down_bias", wanted.down_bias, a.down_bias);
  is_given("gate_a", wanted.gate_a, a.gate_a);
  is_given("gate_b", wanted.gate_b, a.gate_b);
  is_given("up_a", wanted.up_a, a.up_a);
  is_given("up_b", wanted.up_b, a.up_b);
  is_given("down_a", wanted.down_a, a.down_a);
  is_given("down_b", wanted.down_b, a.down_b);
}

}  // namespace maxmoe::ops
