"""expert_ffn with the gate within `up`: as published models have it."""

from typing import Any

import pytest
import torch

from maxmoe import ops, reference
from support import activations
from support.ffn_call import ffn_call
from support.operator_calls import assert_near, assert_same, result, tolerance
from support.operator_checks import check_registrations, function_of, ignore_warnings_of_transforms
from support.shapes import SKEWED, TINY, Shape, each_shape


def fused(layout: str, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    if layout == "concatenated":
        return torch.cat([gate, up], -1)
    return torch.stack([gate, up], -1).flatten(-2)


def transposed_leaf(matrices: torch.Tensor) -> torch.Tensor:
    """A leaf in the layout of a linear layer, [E, F, D]; the operator gets its transposed view."""
    return matrices.mT.contiguous().requires_grad_()


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", ""])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gate_within_up(every_path: str, dtype: torch.dtype, bias: bool, layout: str) -> None:
    """Equals a separate gate; the gradients of transposed views have the layout of their parameters."""
    call = ffn_call(SKEWED, bias=bias, activation="swigluoai", limit=0.75).cast(dtype)
    cotangent = torch.randn(20, 12, dtype=dtype)
    want = result(call, ops, [cotangent])
    gate, up, gate_bias, up_bias = (call.arguments[name] for name in ("gate", "up", "gate_bias", "up_bias"))
    both, down = transposed_leaf(fused(layout, gate, up)), transposed_leaf(call.arguments["down"])
    bias_of_both = fused(layout, gate_bias, up_bias).requires_grad_() if bias else None
    call = call.trainable().replace(
        gate=None,
        up=both.mT,
        down=down.mT,
        gate_bias=None,
        up_bias=bias_of_both,
        fused_gate=layout,
    )
    out = call()[0]
    out.backward(cotangent)
    grads = want.gradients
    pairs = {
        "out": (out, want.outputs[0]),
        "both": (both.grad, fused(layout, grads["gate"], grads["up"]).mT),
        "down": (down.grad, grads["down"].mT),
        "x": (call.arguments["x"].grad, grads["x"]),
        "weights": (call.arguments["weights"].grad, grads["weights"]),
    }
    if bias_of_both is not None:
        pairs["bias_of_both"] = (bias_of_both.grad, fused(layout, grads["gate_bias"], grads["up_bias"]))
    for name, (got, expected) in pairs.items():
        assert got.is_contiguous(), name
        assert_near(got, expected, tolerance(dtype, 4), name)


@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
@each_shape
def test_is_the_loop(every_path: str, shape: Shape, layout: str) -> None:
    call = ffn_call(shape, limit=0.5)
    gate, up, gate_bias, up_bias = (call.arguments[name] for name in ("gate", "up", "gate_bias", "up_bias"))
    both, bias_of_both = fused(layout, gate, up), fused(layout, gate_bias, up_bias)
    call = call.replace(gate=None, gate_bias=None, up=both, up_bias=bias_of_both, fused_gate=layout)
    assert_same(result(call), result(call, reference), tolerance(torch.float64, 1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("layout", ["concatenated", "interleaved"])
def test_opcheck_gate_within_up(path: str, layout: str) -> None:
    call = ffn_call(SKEWED)
    matrices = fused(layout, call.arguments["gate"], call.arguments["up"]).mT.contiguous().mT
    biases = fused(layout, call.arguments["gate_bias"], call.arguments["up_bias"])
    check_registrations(call.replace(gate=None, gate_bias=None, up=matrices, up_bias=biases, fused_gate=layout))


@ignore_warnings_of_transforms
@pytest.mark.parametrize(
    ("activation", "layout"),
    [
        pytest.param(activation, layout, marks=[pytest.mark.slow] * ((number + shift) % 2))
        for number, activation in enumerate([*activations.LIMITED, activations.SITU])
        for shift, layout in enumerate(["concatenated", "interleaved"])
    ],
    ids=lambda value: value if isinstance(value, str) else activations.name_of(value),
)
def test_derivatives_of_each_activation(path: str, activation: dict[str, Any], layout: str) -> None:
    """Tangents, and second derivatives in reverse and forward mode, for one vector and for a batch of them."""
    call = ffn_call(TINY, bias=False, weights=None, **activation)
    both = fused(layout, call.arguments["gate"], call.arguments["up"])
    call = call.replace(gate=None, up=both, fused_gate=layout)
    function, values = function_of(call.trainable())
    assert torch.autograd.gradcheck(function, values, fast_mode=True, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(
        function, values, fast_mode=True, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )
