"""The backward of expert_ffn: what it saves, its products, a split backward as zero bubble schedules run it."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from maxmoe import ops, reference
from support import activations
from support.matrix_calls import EACH, PARAMETERS, PROJECTIONS, RANKS, ffn_call, with_factors
from support.memory import saved_for_backward
from support.operator_calls import Call, cotangents_of, result
from support.operator_checks import ExecutedOperators, function_of, ignore_warnings_of_transforms
from support.shapes import SKEWED, TINY, UNROUTED

INPUTS = ("x", "weights")
ORDER = ("x", "weights", *(name + field for name in PROJECTIONS for field in ("", "_bias", "_a", "_b")))
each_recompute = pytest.mark.parametrize("recompute", [False, True], ids=["saved", "recomputed"])


class Backward:
    """Computes gradients of a call by the names of its arguments, any number of times."""

    def __init__(self, call: Call) -> None:
        self.call = call.trainable()
        self.outputs = self.call()
        self.inputs = [name for name in INPUTS if name in self.call.floats()]
        self.parameters = [name for name in self.call.floats() if name not in INPUTS]

    def __call__(self, names: Sequence[str], *, retain_graph: bool = True) -> dict[str, Tensor]:
        leaves = [self.call.floats()[name] for name in names]
        gradients = torch.autograd.grad(self.outputs, leaves, cotangents_of(self.outputs), retain_graph=retain_graph)
        return dict(zip(names, gradients, strict=True))

    def all(self) -> dict[str, Tensor]:
        return self([*self.inputs, *self.parameters], retain_graph=False)

    def split(self) -> dict[str, Tensor]:
        return self(self.inputs) | self(self.parameters, retain_graph=False)


def products(function: Callable[[], Any]) -> list[tuple[int, int, int]]:
    """The sizes of the matrix products that torch executes."""
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        function()
    # Not `profiler.events()`, which builds a tree of all events in Python.
    events = profiler.profiler.kineto_results.events()
    shapes = [event.shapes() for event in events if event.name() == "aten::mm"]
    return [(left[0], left[1], right[1]) for left, right, *_ in shapes]


def whole_products(call: Call, function: Callable[[], Any]) -> int:
    """The number of products of [R, D] times [D, F], as a quotient of multiply-adds: biases add less than one."""
    one = len(call.arguments["plan"].slots) * SKEWED.hidden_size * SKEWED.intermediate_size
    return sum(rows * inner * columns for rows, inner, columns in products(function)) // one


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    for name, gradient in got.items():
        assert torch.equal(gradient, expected[name]), name
        assert gradient.stride() == expected[name].stride(), name


# A split backward


@each_recompute
@pytest.mark.parametrize("case", EACH)
def test_same_bits(path: str, case: str, recompute: bool) -> None:
    """Inputs first, parameters first, and one by one; in the split backward no gradient is computed twice."""
    for shape, dtype in ((SKEWED, torch.float64), (UNROUTED, torch.bfloat16)):
        call = ffn_call(shape, **EACH[case]).cast(dtype).replace(recompute=recompute)
        expected = Backward(call).all()
        backward = Backward(call)
        with ExecutedOperators() as executed:
            assert_same_bits(backward.split(), expected)
        weights_first = Backward(call)
        assert_same_bits(weights_first(weights_first.parameters) | weights_first(weights_first.inputs), expected)
        one_by_one = Backward(call)
        assert_same_bits({name: one_by_one([name])[name] for name in expected}, expected)
        masks = [[*arguments["output_mask"]] for name, arguments in executed.calls if name.endswith("_backward")]
        given = {name.replace("_factors.", "_") for name in backward.parameters}
        assert masks == [[name in names for name in ORDER] for names in (backward.inputs, given)]


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
    call = ffn_call(SKEWED, activation="silu")
    with ops.force_aten(True):
        backward = Backward(call)
        if frozen_at == "forward":
            for name, leaf in backward.call.floats().items():
                leaf.requires_grad_(name in trained)
            backward.outputs = backward.call()
        assert whole_products(call, lambda: backward(trained)) == expected


@pytest.mark.parametrize("trained", ["gate", "up", "down"])
def test_factors_alone_need_products_with_r_columns(trained: str) -> None:
    """Where neither x nor a matrix is trained, the backward of `a` and `b` multiplies nothing by the matrix itself."""
    call = with_factors(ffn_call(SKEWED, bias=False, weights=None)).trainable()
    for name, tensor in call.floats().items():
        tensor.requires_grad_(name.startswith(f"{trained}_factors"))
    with ops.force_aten(True):
        out = call()[0]
        sizes = {(inner, columns) for _, inner, columns in products(lambda: out.sum().backward())}
    hidden_size, width = SKEWED.hidden_size, SKEWED.intermediate_size
    # The gradient of the activations needs down; nothing needs gate or up.
    assert (width, hidden_size) not in sizes
    assert ((hidden_size, width) in sizes) == (trained != "down")


@each_recompute
def test_no_gradient_of_a_frozen_matrix_beside_factors(path: str, recompute: bool) -> None:
    call = with_factors(ffn_call(SKEWED, recompute=recompute)).trainable()
    for name in PROJECTIONS:
        call.arguments[name].requires_grad_(False)
    out = call()[0]
    with ExecutedOperators() as executed:
        out.sum().backward()
    ((_, arguments),) = [entry for entry in executed.calls if entry[0] == "expert_ffn_backward"]
    assert [name for name, wanted in zip(ORDER, arguments["output_mask"], strict=True) if not wanted] == [*PROJECTIONS]
    assert all(call.arguments[f"{name}_factors.{field}"].grad.any() for name in PROJECTIONS for field in "ab")


@pytest.mark.parametrize("trained", ["x", "weights", *PARAMETERS])
def test_gradient_of_one_argument_alone(every_path: str, trained: str) -> None:
    """The argument that requires a gradient gets the same one as with all others, recomputed or not."""
    call = ffn_call(SKEWED)
    expected = result(call, reference, [torch.ones(20, 12, dtype=torch.float64)]).gradients[trained]
    for recompute in (False, True):
        leaf = call.arguments[trained].clone().requires_grad_()
        call.replace(**{trained: leaf}, recompute=recompute)()[0].sum().backward()
        assert leaf.grad is not None and expected is not None
        torch.testing.assert_close(leaf.grad, expected)


# Memory


def own(call: Call) -> list[Tensor]:
    """The tensors that a call saves beside its arguments."""
    call = call.trainable()
    with saved_for_backward([*call.tensors().values(), *call.arguments["plan"][:4]]) as saved:
        call()
    return [tensor for tensor in saved if tensor.numel()]


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_saves_the_preactivations_and_its_arguments(every_path: str, dtype: torch.dtype, gated: bool) -> None:
    """D + 2 K F elements per token: no [R, D] tensor, and neither activations nor copies of parameters.

    Recomputed: the arguments alone. Low-rank factors add r columns of each row.
    """
    call = ffn_call(SKEWED, gated=gated, activation="silu").cast(dtype)
    call = call.replace(weights=call.arguments["weights"].to(torch.promote_types(dtype, torch.float32)))
    plan = call.arguments["plan"]
    num_rows, width = len(plan.slots), (2 if gated else 1) * SKEWED.intermediate_size
    floats = [tensor for tensor in own(call) if tensor.is_floating_point()]
    integers = [tensor for tensor in own(call) if not tensor.is_floating_point()]
    assert sum(tensor.numel() for tensor in floats) == num_rows * width
    assert all(tensor.dtype == dtype for tensor in floats)
    assert sum(tensor.numel() for tensor in integers) <= len(plan.slots) + len(plan.rows) + len(plan.group_sizes)
    assert not own(call.replace(recompute=True))
    if gated and dtype == torch.float64:  # others are casts of the factors
        extra = sum(map(Tensor.numel, own(with_factors(call)))) - sum(map(Tensor.numel, own(call)))
        assert extra == num_rows * sum(RANKS.values()) and not own(with_factors(call).replace(recompute=True))


@each_recompute
def test_backward_takes_the_memory_of_the_preactivations_but_from_a_retained_graph(recompute: bool) -> None:
    call = ffn_call(SKEWED, recompute=recompute).trainable()
    with saved_for_backward(call.tensors().values()) as saved:
        (out,) = call()
    own = [z for z in saved if z.is_floating_point() and z.numel()]
    before = [z.detach().clone() for z in own]
    assert len(own) == (0 if recompute else 1)
    trained = list(call.floats().values())
    first = torch.autograd.grad(out.square().sum(), trained, retain_graph=True)
    assert all(map(torch.equal, own, before))
    second = torch.autograd.grad(out.square().sum(), trained)
    assert not any(map(torch.equal, own, before))
    assert all(map(torch.equal, first, second))


# Second derivatives


@ignore_warnings_of_transforms
@pytest.mark.parametrize("activation", [*activations.LIMITED, activations.SITU], ids=activations.name_of)
def test_derivatives_of_each_activation(path: str, activation: dict[str, Any]) -> None:
    """Tangents, and second derivatives in reverse and forward mode, for one vector and for a batch of them."""
    function, values = function_of(ffn_call(TINY, bias=False, weights=None, **activation).trainable())
    assert torch.autograd.gradcheck(function, values, fast_mode=True, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(
        function, values, fast_mode=True, check_fwd_over_rev=True, check_rev_over_rev=True, check_batched_grad=True
    )


@pytest.mark.parametrize("case", ["concatenated", "interleaved", "recomputed"])
def test_second_derivatives_of_options(path: str, case: str) -> None:
    call = (
        ffn_call(UNROUTED, activation="gelu", recompute=True) if case == "recomputed" else ffn_call(TINY, **EACH[case])
    )
    function, values = function_of(call.trainable())
    assert torch.autograd.gradgradcheck(function, values, fast_mode=True)
