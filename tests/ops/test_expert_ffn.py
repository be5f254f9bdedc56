"""expert_ffn: gather, up and gate, activation, down and the weighted sum as one operator.

test_expert_ffn_backward.py looks at what its backward saves and computes.
"""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from maxmoe import ops, reference
from support import activations
from support.matrix_calls import EACH, PARAMETERS, ffn_call, fused
from support.named import named
from support.operator_calls import Call, assert_near, assert_same, expected_result, result, tolerance
from support.operator_checks import (
    MixedWeights,
    OperatorTests,
    UnreadElements,
    check_compile,
    check_registrations,
)
from support.paths import each_case, emulated
from support.shapes import DTYPES, EMPTY_EXPERTS, ODD_WIDTHS, SEVERAL_BLOCKS, SKEWED, TINY, UNROUTED, Shape


class TestExpertFfn(MixedWeights, UnreadElements, OperatorTests):
    """In 16 bits the preactivations, the activations, their gradients and the rows are rounded."""

    roundings = 8
    shared_in_backward = frozenset({"expert_ffn_backward"})  # test_expert_ffn_backward.py looks into it
    optional = ("gate_bias", "up_bias", "down_bias")

    def call(self, shape: Shape) -> Call:
        return ffn_call(shape)

    def unread(self, call: Call) -> dict[str, Tensor]:
        is_unrouted = (call.arguments["plan"].rows < 0).view_as(call.arguments["weights"])
        return {"x": is_unrouted.all(1), "weights": is_unrouted, "out": is_unrouted.all(1)}


# Values


# Gradients jump at limits, and at the 0 of a relu, where rounding may choose the other side.
SMOOTH = [each for each in activations.EACH if each["activation"] != "relu"]


@emulated
@pytest.mark.parametrize("activation", [*activations.EACH, *activations.LIMITED], ids=activations.name_of)
def test_every_activation(every_path: str, activation: dict[str, Any]) -> None:
    """With a gate and, if it does not need one, without; gradients that do not jump in every dtype."""
    for gated in (True, False) if activation in activations.PLAIN else (True,):
        call = ffn_call(SKEWED, gated=gated, **activation)
        with named(f"{gated=}"):
            assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))
    for dtype in DTYPES[1:] if activation in SMOOTH else ():
        call = ffn_call(ODD_WIDTHS, **activation).cast(dtype)
        with named(dtype):
            assert_same(result(call), expected_result(call), tolerance(dtype, 8))


@each_case(
    "case",
    [(name,) for name in EACH],
    in_emulator=[("no weights",), ("plain",), ("concatenated",), ("interleaved",), ("factors, concatenated",)],
)
def test_every_option(every_path: str, case: str) -> None:
    in_low_precision = torch.float32 if "limit" in EACH[case] else torch.bfloat16
    for shape, dtype in ((SKEWED, torch.float64), (UNROUTED, torch.float64), (ODD_WIDTHS, in_low_precision)):
        call = ffn_call(shape, **EACH[case]).cast(dtype)
        with named(shape, dtype):
            assert_same(result(call), expected_result(call), tolerance(dtype, 8))


@pytest.mark.parametrize("case", EACH)
def test_recomputation_gives_the_same_bits(path: str, case: str) -> None:
    cases = ((SKEWED, torch.float64), (UNROUTED, torch.float32), (SEVERAL_BLOCKS, torch.bfloat16))
    for shape, dtype in cases:
        call = ffn_call(shape, **EACH[case]).cast(dtype)
        with named(shape, dtype):
            assert_same(result(call.replace(recompute=True)), result(call))


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


def test_nan_in_experts_without_tokens(every_path: str) -> None:
    call = ffn_call(EMPTY_EXPERTS)
    plan = call.arguments["plan"]
    for name in PARAMETERS:
        call.arguments[name][plan.group_sizes == 0] = float("nan")
    got = result(call)
    assert all(value is not None and value.isfinite().all() for value in (got.outputs[0], *got.gradients.values()))
    assert_same(got, result(call, reference), tolerance(torch.float64, 1))


@emulated
def test_activation_extremes_stay_finite(every_path: str) -> None:
    """Preactivations of +-1e4, where exp overflows."""
    for activation in [*activations.EACH, *activations.LIMITED]:
        call = ffn_call(TINY, bias=False, **activation).cast(torch.float32)
        call = call.replace(gate=1e4 * call.arguments["gate"])
        got = result(call)
        for value in (got.outputs[0], *got.gradients.values()):
            assert value is not None and value.isfinite().all(), activation
        assert_same(got, expected_result(call), 1e-4)


# Rounding

# Norm of the error in bfloat16 by the norm of the value in float64. One rounding is 1.66e-3; ATen rounds after every
# elementwise operation.
ROUNDING = {"out": 4.4e-3, "x": 4.85e-3, "gate": 4.55e-3, "up": 4.55e-3, "down": 4.4e-3, "weights": 4.45e-3}


@emulated
def test_rounding_in_bfloat16(every_path: str) -> None:
    weights, experts = torch.randn(256, 8).softmax(-1).topk(4)
    call = ffn_call(Shape("large", 256, 8, 4, 128, 96, lambda _: 0), bias=False, plan=ops.ragged_plan(experts, 8))
    call = call.cast(torch.bfloat16).replace(weights=weights)
    cotangent = torch.randn(256, 128).bfloat16()
    got = result(call, cotangents=[cotangent])
    with ops.force_aten(False):
        exact = result(call.cast(torch.float64), cotangents=[cotangent.double()])
    pairs = {"out": (got.outputs[0], exact.outputs[0])}
    pairs |= {name: (gradient, exact.gradients[name]) for name, gradient in got.gradients.items()}
    errors = {name: float((one.double() - other).norm() / other.norm()) for name, (one, other) in pairs.items()}
    assert all(error < ROUNDING[name] for name, error in errors.items()), errors


# Gate and up in one matrix


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
def test_gradients_of_transposed_views_have_the_layout_of_their_parameters(every_path: str, layout: str) -> None:
    """Leaves as a linear layer has them, [E, F, D]; the operator gets their transposed views."""
    call = ffn_call(SKEWED, **{"activation": "swigluoai", "limit": 0.75})
    want = result(call).gradients
    gate, up, gate_bias, up_bias = (call.arguments[name] for name in ("gate", "up", "gate_bias", "up_bias"))
    both, down = (each.mT.contiguous().requires_grad_() for each in (fused(layout, gate, up), call.arguments["down"]))
    biases = {"gate_bias": None, "up_bias": fused(layout, gate_bias, up_bias)}
    views = call.replace(gate=None, up=both.mT, down=down.mT, fused_gate=layout, **biases)
    generator = torch.Generator().manual_seed(7)  # as `cotangents_of`
    views()[0].backward(torch.randn(20, 12, generator=generator, dtype=torch.float64))
    for leaf, expected in ((both, fused(layout, want["gate"], want["up"])), (down, want["down"])):
        assert leaf.grad is not None and leaf.grad.is_contiguous()
        assert_near(leaf.grad, expected.mT, tolerance(torch.float64, 1), layout)


# Compilation


@pytest.mark.parametrize("case", ["plain, no weights", "concatenated", "interleaved", "recomputed"])
def test_opcheck_of_options(case: str) -> None:
    check_registrations(ffn_call(SKEWED, **EACH.get(case, {"recompute": True})))


def test_compiles_with_inductor() -> None:
    check_compile(ffn_call(SKEWED), "inductor")
    check_compile(ffn_call(SKEWED, recompute=True), "aot_eager")
