"""expert_ffn in a split backward, as zero bubble schedules run it: first x and routing weights, then the parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from maxmoe import ops
from support.ffn_call import PARAMETERS, ffn_call, with_fused_gate
from support.operator_calls import Call, cotangents_of
from support.operator_checks import ExecutedOperators
from support.shapes import SKEWED, UNROUTED, Shape

INPUTS = ("x", "weights")
VARIANTS: dict[str, Callable[[Shape], Call]] = {
    "gated": lambda shape: ffn_call(shape, bias=False),
    "gated, biases, clipped": lambda shape: ffn_call(shape, activation="swigluoai", limit=0.75),
    "concatenated": lambda shape: with_fused_gate(ffn_call(shape, activation="gelu"), "concatenated"),
    "interleaved": lambda shape: with_fused_gate(ffn_call(shape, bias=False), "interleaved"),
    "plain, biases": lambda shape: ffn_call(shape, gated=False, activation="relu2"),
    "plain, no weights": lambda shape: ffn_call(shape, gated=False, bias=False, weights=None),
    "gated, no weights": lambda shape: ffn_call(shape, weights=None, activation="gelu_tanh"),
}
each_variant = pytest.mark.parametrize("variant", VARIANTS.values(), ids=VARIANTS)
each_recompute = pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])


class Backward:
    """Computes gradients of a call by the names of its arguments, any number of times."""

    def __init__(self, call: Call) -> None:
        self.call = call.trainable()
        self.outputs = self.call()
        self.inputs = [name for name in INPUTS if name in self.call.floats()]
        self.parameters = [name for name in PARAMETERS if name in self.call.floats()]

    def __call__(self, names: Sequence[str], *, retain_graph: bool = True) -> dict[str, Tensor]:
        leaves = [self.call.floats()[name] for name in names]
        gradients = torch.autograd.grad(self.outputs, leaves, cotangents_of(self.outputs), retain_graph=retain_graph)
        return dict(zip(names, gradients, strict=True))

    def all(self) -> dict[str, Tensor]:
        return self([*self.inputs, *self.parameters], retain_graph=False)

    def split(self) -> dict[str, Tensor]:
        return self(self.inputs) | self(self.parameters, retain_graph=False)


def products(function: Callable[[], Any]) -> int:
    """The number of multiply-adds of the matrix products that torch executes."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function()
    # Not `profiler.events()`, which builds a tree of all events in Python.
    events = profiler.profiler.kineto_results.events()
    shapes = [event.shapes() for event in events if event.name() == "aten::mm"]
    return sum(left[0] * left[1] * right[1] for left, right, *_ in shapes)


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert torch.equal(gradient, expected[name]), name
        assert gradient.stride() == expected[name].stride(), name


@each_recompute
@each_variant
def test_same_bits(path: str, variant: Callable[[Shape], Call], recompute: bool) -> None:
    for shape, dtype in ((SKEWED, torch.float64), (UNROUTED, torch.float64), (UNROUTED, torch.bfloat16)):
        call = variant(shape).cast(dtype).replace(recompute=recompute)
        expected = Backward(call).all()
        assert_same_bits(Backward(call).split(), expected)
        weights_first = Backward(call)
        assert_same_bits(weights_first(weights_first.parameters) | weights_first(weights_first.inputs), expected)
        one_by_one = Backward(call)
        assert_same_bits({name: one_by_one([name])[name] for name in expected}, expected)


@each_recompute
@each_variant
def test_no_gradient_is_computed_twice(path: str, variant: Callable[[Shape], Call], recompute: bool) -> None:
    backward = Backward(variant(SKEWED).replace(recompute=recompute))
    with ExecutedOperators() as executed:
        backward.split()
    first, second = ([*arguments["output_mask"]] for name, arguments in executed.calls if name.endswith("_backward"))
    of_one = ("", "_bias", "_a", "_b")  # no factors are given: test_low_rank.py
    order = ("x", "weights", *(name + field for name in ("gate", "up", "down") for field in of_one))
    assert first == [name in backward.inputs for name in order]
    assert second == [name in backward.parameters for name in order]


@each_recompute
@each_variant
def test_products(variant: Callable[[Shape], Call], recompute: bool) -> None:
    """Each gradient is a product that runs once; the gradient of the activations and recomputed products run twice."""
    call = variant(SKEWED).replace(recompute=recompute)
    plan = call.arguments["plan"]
    one = len(plan.slots) * SKEWED.hidden_size * SKEWED.intermediate_size
    wide = 1 if call.arguments["gate"] is None and call.arguments.get("fused_gate") is None else 2
    recomputed = wide * recompute
    with ops.force_aten(True):
        together, apart = Backward(call), Backward(call)
        # The products of the biases' gradients are smaller than one of these.
        assert products(together.all) // one == 2 + 2 * wide + recomputed
        assert products(lambda: apart(apart.inputs)) // one == 1 + wide + recomputed
        assert products(lambda: apart(apart.parameters)) // one == 2 + wide + recomputed


@pytest.mark.parametrize("frozen_at", ["forward", "backward"])
@pytest.mark.parametrize(
    ("trained", "expected"),
    [
        (("x",), 3),
        (("weights",), 1),
        (("gate",), 2),
        (("up",), 2),
        (("down",), 1),
        (("down", "down_bias"), 1),
        (("gate", "up", "down"), 4),
        (("x", "weights", "down"), 4),
    ],
    ids=str,
)
def test_products_of_frozen_arguments(trained: tuple[str, ...], expected: int, frozen_at: str) -> None:
    """`expected`: number of products of [R, D] times [D, F], without biases."""
    call = ffn_call(SKEWED, activation="silu")
    with ops.force_aten(True):
        backward = Backward(call)
        if frozen_at == "forward":
            for name, leaf in backward.call.floats().items():
                leaf.requires_grad_(name in trained)
            backward.outputs = backward.call()
        one = len(call.arguments["plan"].slots) * SKEWED.hidden_size * SKEWED.intermediate_size
        assert products(lambda: backward(trained)) // one == expected


def test_gradients_of_down_leave_the_preactivations(path: str) -> None:
    """These do not need the gradient of the preactivations, so that a retained graph's are not copied."""
    call = ffn_call(SKEWED)
    backward = Backward(call)
    expected = Backward(call).all()
    assert_same_bits(backward(["down", "down_bias"]), {name: expected[name] for name in ("down", "down_bias")})
    assert_same_bits(backward.split(), expected)


def test_double_backward_of_one_argument(path: str) -> None:
    """create_graph takes the path through ATen, which also computes wanted gradients alone."""
    call = ffn_call(UNROUTED, activation="gelu").trainable()
    leaves = call.floats()
    (out,) = call()
    for name, leaf in leaves.items():
        (gradient,) = torch.autograd.grad(out.square().sum(), [leaf], create_graph=True)
        together = torch.autograd.grad(out.square().sum(), list(leaves.values()), create_graph=True)
        expected = dict(zip(leaves, together, strict=True))[name]
        torch.testing.assert_close(gradient, expected, rtol=1e-13, atol=1e-13)
        wanted = list(leaves.values())
        got = torch.autograd.grad(gradient.square().sum(), wanted, retain_graph=True, allow_unused=True)
        want = torch.autograd.grad(expected.square().sum(), wanted, retain_graph=True, allow_unused=True)
        for one, other in zip(got, want, strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
