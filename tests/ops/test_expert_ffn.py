"""expert_ffn: gather, up and gate, activation, down and the weighted sum as one operator."""

import dataclasses
from typing import Any

import pytest
import torch

from maxmoe import ops, reference
from support import activations
from support.ffn_call import PARAMETERS, ffn_call
from support.operator_calls import (
    Call,
    assert_same,
    expected_result,
    refusal,
    result,
    saved_for_backward,
    short,
    tolerance,
)
from support.operator_checks import (
    MixedWeights,
    OperatorTests,
    check_compile,
    check_registrations,
    compile_whole,
)
from support.shapes import ODD_WIDTHS, SEVERAL_BLOCKS, SKEWED, TINY, UNROUTED, Shape, each_shape

NAN = float("nan")


class TestExpertFfn(MixedWeights, OperatorTests):
    """In 16 bits the preactivations, the activations, their gradients and the rows are rounded."""

    roundings = 8
    shared_in_backward = frozenset({"expert_ffn_backward"})  # test_split_backward.py looks into it

    def call(self, shape: Shape) -> Call:
        return ffn_call(shape)


each_bias = pytest.mark.parametrize("bias", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["bias", ""])


@pytest.mark.parametrize("activation", [*activations.EACH, *activations.LIMITED], ids=activations.name_of)
@each_bias
def test_every_gated_combination(every_path: str, bias: bool, activation: dict[str, Any]) -> None:
    call = ffn_call(SKEWED, bias=bias, **activation)
    assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


@pytest.mark.parametrize("activation", activations.PLAIN, ids=activations.name_of)
@each_bias
def test_every_plain_combination(every_path: str, bias: bool, activation: dict[str, Any]) -> None:
    call = ffn_call(SKEWED, gated=False, bias=bias, **activation)
    assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


IN_LOW_PRECISION = [{"activation": "gelu"}, {"activation": "swigluoai"}, activations.SITU, activations.LIMITED_OUTPUT]


@pytest.mark.parametrize("activation", IN_LOW_PRECISION, ids=activations.name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_activations_in_low_precision(every_path: str, dtype: torch.dtype, activation: dict[str, Any]) -> None:
    call = ffn_call(ODD_WIDTHS, **activation).cast(dtype)
    assert_same(result(call), expected_result(call), tolerance(dtype, 8))


@each_shape
def test_without_weights_gate_and_bias(every_path: str, shape: Shape) -> None:
    call = ffn_call(shape, gated=False, bias=False, weights=None, activation="relu2")
    assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


@pytest.mark.parametrize("missing", PARAMETERS[3:])
def test_some_biases_only(every_path: str, missing: str) -> None:
    call = ffn_call(SKEWED).replace(**{missing: None})
    assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


@pytest.mark.parametrize("max_rows", [0, 1, 20])
def test_of_a_share_of_the_experts_cut_at_max_rows(every_path: str, max_rows: int) -> None:
    call = ffn_call(SKEWED)
    share = {name: call.arguments[name][1:5] for name in PARAMETERS}
    plan = ops.ragged_plan(SKEWED.experts(), 8, first_expert=1, num_local_experts=4, max_rows=max_rows)
    call = call.replace(plan=plan, **share)
    assert_same(result(call), result(call, reference), 1e-13)


@pytest.mark.parametrize("empty", ["num_experts", "hidden_size", "intermediate_size"])
def test_a_size_of_zero(every_path: str, empty: str) -> None:
    """No local experts, or experts of width 0: the result is made of biases."""
    sizes = dataclasses.replace(SKEWED, **{empty: 0})
    plan = ops.ragged_plan(SKEWED.experts(), 8, num_local_experts=sizes.num_experts)
    call = ffn_call(sizes, plan=plan)
    assert_same(result(call), result(call, reference), 1e-13)


@pytest.mark.parametrize("trained", ["x", "weights", *PARAMETERS])
def test_gradient_of_one_argument_alone(every_path: str, trained: str) -> None:
    """The argument that requires a gradient gets the same one as with all others."""
    call = ffn_call(SKEWED)
    expected = result(call, reference, [torch.ones(20, 12, dtype=torch.float64)]).gradients[trained]
    leaf = call.arguments[trained].clone().requires_grad_()
    call.replace(**{trained: leaf})()[0].sum().backward()
    assert leaf.grad is not None and expected is not None
    torch.testing.assert_close(leaf.grad, expected)


def test_is_the_composition_of_the_other_operators(every_path: str) -> None:
    call = ffn_call(SEVERAL_BLOCKS, bias=False)
    x, weights, plan, gate, up, down = (call.arguments[name] for name in ("x", "weights", "plan", "gate", "up", "down"))
    rows = ops.ragged_sort(x, plan)
    inner = torch.nn.functional.silu(ops.gmm(rows, gate, plan.group_sizes)) * ops.gmm(rows, up, plan.group_sizes)
    composed = ops.ragged_unsort(ops.gmm(inner, down, plan.group_sizes), plan, weights)
    torch.testing.assert_close(call()[0], composed)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_saves_the_preactivations_and_its_arguments(every_path: str, dtype: torch.dtype, gated: bool) -> None:
    """D + 2 K F elements per token: no [R, D] tensor, and neither activations nor copies of parameters."""
    call = ffn_call(SKEWED, gated=gated, activation="silu").cast(dtype)
    call = call.replace(weights=call.arguments["weights"].to(torch.promote_types(dtype, torch.float32)))
    call = call.trainable()
    plan = call.arguments["plan"]
    num_rows, width = len(plan.slots), (2 if gated else 1) * SKEWED.intermediate_size
    with saved_for_backward() as saved:
        call()
    arguments = {tensor.data_ptr() for tensor in (*call.tensors().values(), *plan[:4])}
    extra = [tensor for tensor in saved if tensor.data_ptr() not in arguments]
    floats = [tensor for tensor in extra if tensor.is_floating_point()]
    integers = [tensor for tensor in extra if not tensor.is_floating_point()]
    assert sum(tensor.numel() for tensor in floats) == num_rows * width
    assert all(tensor.dtype == dtype for tensor in floats)
    assert sum(tensor.numel() for tensor in integers) <= len(plan.slots) + len(plan.rows) + len(plan.group_sizes)


def test_backward_takes_the_memory_of_the_preactivations_but_from_a_retained_graph() -> None:
    call = ffn_call(SKEWED).trainable()
    with saved_for_backward() as saved:
        (out,) = call()
    arguments = {tensor.data_ptr() for tensor in call.tensors().values()}
    (preactivations,) = [z for z in saved if z.is_floating_point() and z.data_ptr() not in arguments]
    before = preactivations.detach().clone()
    trained = [tensor for tensor in call.tensors().values() if tensor.requires_grad]
    first = torch.autograd.grad(out.square().sum(), trained, retain_graph=True)
    assert torch.equal(preactivations, before)
    second = torch.autograd.grad(out.square().sum(), trained)
    assert not torch.equal(preactivations, before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_nan_of_nobody_stays_out(every_path: str) -> None:
    """NaN in idle tokens and their gradients, in weights of slots without an expert, in experts without tokens."""
    shape = Shape("idle", 11, 5, 2, 8, 4, lambda slot: -1 if slot % 5 < 3 else slot % 4)
    call = ffn_call(shape)
    idle = shape.experts() < 0
    changed = {name: call.arguments[name].clone() for name in ("x", "weights", *PARAMETERS)}
    changed["x"][idle.all(1)] = NAN
    changed["weights"][idle] = NAN
    for name in PARAMETERS:
        changed[name][4] = NAN
    cotangent = torch.randn(shape.num_tokens, shape.hidden_size, dtype=torch.float64)
    cotangent[idle.all(1)] = NAN
    assert cotangent.isnan().any()
    call = call.replace(**changed)
    got = result(call, ops, [cotangent])
    assert not got.outputs[0][idle.all(1)].any()
    for value in (got.outputs[0], *got.gradients.values()):
        assert value is not None and value.isfinite().all()
    assert_same(got, result(call, reference, [cotangent]), tolerance(torch.float64, 1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(path: str, dtype: torch.dtype) -> None:
    """Equals a call with x and parameters in the autocast dtype; gradients have the dtypes of the arguments."""
    call = ffn_call(SKEWED).cast(torch.float32)
    cotangent = torch.randn(20, 12).to(dtype)
    with torch.autocast("cpu", dtype=dtype):
        got = result(call, ops, [cotangent])
    assert got.outputs[0].dtype == dtype
    assert all(gradient is not None and gradient.dtype == torch.float32 for gradient in got.gradients.values())
    low = call.cast(dtype).replace(weights=call.arguments["weights"])
    assert_same(got, result(low, ops, [cotangent]), tolerance(dtype, 1))


def test_activation_extremes_stay_finite(every_path: str) -> None:
    """Preactivations of +-1e4, where exp overflows."""
    for activation in [*activations.EACH, *activations.LIMITED]:
        call = ffn_call(TINY, bias=False, **activation).cast(torch.float32)
        call = call.replace(gate=1e4 * call.arguments["gate"])
        got = result(call)
        for value in (got.outputs[0], *got.gradients.values()):
            assert value is not None and value.isfinite().all(), activation
        assert_same(got, expected_result(call), 1e-4)


@pytest.mark.sampled(1)
def test_compiles_with_inductor(path: str) -> None:
    check_compile(ffn_call(SKEWED), "inductor")


@pytest.mark.sampled(1)
def test_compiles_after_its_plan(path: str) -> None:
    """One compilation serves several numbers of rows."""

    def experts_of(x: Any, weights: Any, experts: Any, **parameters: Any) -> Any:
        plan = ops.ragged_plan(experts, 4)
        return Call("expert_ffn", {"x": x, "weights": weights, "plan": plan, **parameters})()[0]

    compiled = compile_whole(experts_of, "aot_eager")
    for shape in (UNROUTED, Shape("more", 17, 4, 2, 8, 4, lambda slot: slot % 4)):
        call = ffn_call(shape)
        arguments = {name: call.arguments[name] for name in ("x", "weights", *PARAMETERS)}
        arguments = {name: value.requires_grad_() for name, value in arguments.items()}
        eager, fast = (f(experts=shape.experts(), **arguments) for f in (experts_of, compiled))
        torch.testing.assert_close(fast, eager)
        expected = torch.autograd.grad(eager.square().sum(), list(arguments.values()))
        gradients = torch.autograd.grad(fast.square().sum(), list(arguments.values()))
        torch.testing.assert_close(gradients, expected)


@pytest.mark.sampled(1)
def test_opcheck_without_gate_and_weights(path: str) -> None:
    check_registrations(ffn_call(SKEWED, gated=False, bias=False, weights=None))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"x": torch.randn(20)}, ("x", "[T, D]", "[20]")),
        ({"x": torch.zeros(20, 12, dtype=torch.int64)}, ("x", "float64", "Long")),
        ({"weights": torch.randn(20, 2)}, ("weights", "60", "[20, 2]")),
        ({"weights": torch.zeros(20, 3, dtype=torch.int64)}, ("weights", "float64", "Long")),
        ({"weights": torch.zeros(20, 3, device="meta")}, ("weights", "cpu", "meta")),
        ({"gate": torch.randn(12, 6)}, ("gate", "[L", "[12, 6]")),
        ({"gate": torch.randn(8, 12, 7)}, ("gate", "6", "[8, 12, 7]")),
        ({"gate": torch.randn(8, 12, 6, dtype=torch.float64)}, ("gate", "Float", "Double")),
        ({"up": torch.randn(8, 12)}, ("up", "[L, D, F]", "[8, 12]")),
        ({"up": torch.randn(8, 11, 6)}, ("up", "12", "[8, 11, 6]")),
        ({"up": torch.randn(8, 12, 6, dtype=torch.float64)}, ("up", "Float", "Double")),
        ({"up": torch.randn(8, 12, 6, device="meta")}, ("up", "cpu", "meta")),
        ({"down": torch.randn(8, 6)}, ("down", "[L", "[8, 6]")),
        ({"down": torch.randn(8, 12, 6)}, ("down", "[8, 12, 6]")),
        ({"down": torch.randn(7, 6, 12)}, ("down", "8", "[7, 6, 12]")),
        ({"gate_bias": torch.randn(8, 5)}, ("gate_bias", "6", "[8, 5]")),
        ({"gate": None, "gate_bias": torch.randn(8, 6)}, ("gate_bias", "gate")),
        ({"up_bias": torch.randn(8)}, ("up_bias", "[L", "[8]")),
        ({"down_bias": torch.randn(8, 6)}, ("down_bias", "12", "[8, 6]")),
        ({"activation": "swish"}, ("activation", "silu", "swish")),
        ({"activation": "swigluoai", "gate": None}, ("activation", "swigluoai", "gate")),
        ({"limit": 0.0}, ("limit", "0")),
        ({"limit": -1.0}, ("limit", "-1")),
        ({"limit": 1.0, "gate": None}, ("limit", "gate")),
        ({"limit": 1.0, "limit_target": "gate"}, ("limit_target", "input, output", "gate")),
        ({"limit_target": "output"}, ("limit", "limit_target output", "None")),
        ({**activations.SITU, "gate": None}, ("gate", "situ", "None")),
        ({**activations.SITU, "limit": 7.0}, ("limit", "situ", "7")),
        ({**activations.SITU, "up_softcap": None}, ("up_softcap", "situ", "None")),
        ({**activations.SITU, "gate_softcap": -4.0}, ("gate_softcap", "positive", "-4")),
        ({**activations.SITU, "up_softcap": float("inf")}, ("up_softcap", "finite", "inf")),
        ({"gate_softcap": 4.0}, ("gate_softcap", "silu", "4")),
        ({"fused_gate": "split", "gate": None}, ("fused_gate", "interleaved", "split")),
        ({"fused_gate": "interleaved"}, ("gate", "interleaved", "[8, 12, 6]")),
        ({"fused_gate": "interleaved", "gate": None, "up": torch.randn(8, 12, 5)}, ("up", "2F", "[8, 12, 5]")),
        ({"fused_gate": "interleaved", "gate": None}, ("down", "3", "[8, 6, 12]")),
        ({"plan.slots": torch.full((60,), 60)}, ("slots", "60")),
        ({"plan.rows": torch.full((60,), 60)}, ("rows", "60")),
        ({"plan.rows": torch.full((60,), -2)}, ("rows", "60", "-2")),
        ({"plan.rows": torch.zeros(59, dtype=torch.int64)}, ("rows", "60", "59")),
        ({"plan.group_sizes": torch.full((8,), 8)}, ("group_sizes", "60", "8")),
        ({"plan.group_sizes": torch.tensor([61, -1, 0, 0, 0, 0, 0, 0])}, ("group_sizes", "60", "61")),
        ({"plan.group_sizes": torch.tensor([60])}, ("up", "1", "group_sizes", "[8, 12, 6]")),
        ({"plan.top_k": 2}, ("weights", "40", "[20, 3]")),
    ],
    ids=short,
)
def test_refuses(path: str, changes: dict[str, Any], named: tuple[str, ...]) -> None:
    arguments = ffn_call(SKEWED, bias=False).cast(torch.float32).arguments
    for name, value in changes.items():
        if name.startswith("plan."):
            arguments["plan"] = arguments["plan"]._replace(**{name.removeprefix("plan."): value})
        else:
            arguments[name] = value
    with refusal("expert_ffn", *named):
        Call("expert_ffn", arguments)()


def test_kernels_refuse_rows_of_no_group() -> None:
    """Plans on devices other than the CPU may have rows without a slot."""
    arguments = ffn_call(SKEWED, bias=False).cast(torch.float32).arguments
    arguments["plan"] = arguments["plan"]._replace(group_sizes=torch.full((8,), 7))
    with refusal("expert_ffn", "group_sizes", "60", "56"):
        Call("expert_ffn", arguments)()
