"""The layer and a block of the decoder in a zero bubble schedule of torch.distributed.pipelining.

Such a schedule computes the gradient of the input of a stage first, and the gradients of its parameters later, so that
the next rank does not wait for them.
"""

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from maxmoe import set_recompute
from support import small_decoder
from support.moe_layers import COMPUTE, FAMILIES, LAYERS, make, tokens
from support.operator_calls import cotangents_of
from support.operator_checks import ExecutedOperators
from support.pairwise import pairwise


class Gradients(NamedTuple):
    """Gradients of x and of the parameters, and the operators of one backward, or of its two halves."""

    values: dict[str, Tensor | None]
    executed: list[ExecutedOperators]


def outputs_of(module: nn.Module, x: Tensor) -> list[Tensor]:
    torch.manual_seed(3)  # seed of random routers
    return [out for out in module(x)[:2] if out is not None and out.requires_grad]


def together(module: nn.Module, x: Tensor) -> Gradients:
    x = x.clone().requires_grad_()
    leaves = {"x": x, **dict(module.named_parameters())}
    outputs = outputs_of(module, x)
    with ExecutedOperators() as executed:
        gradients = torch.autograd.grad(outputs, list(leaves.values()), cotangents_of(tuple(outputs)))
    return Gradients(dict(zip(leaves, gradients, strict=True)), [executed])


def apart(module: nn.Module, x: Tensor) -> Gradients:
    x = x.clone().requires_grad_()
    parameters = dict(module.named_parameters())
    outputs = outputs_of(module, x)
    cotangents = cotangents_of(tuple(outputs))
    with ExecutedOperators() as first:
        (gradient,), groups = stage_backward_input(outputs, cotangents, [x], iter(parameters.values()))
    assert all(parameter.grad is None for parameter in parameters.values())
    with ExecutedOperators() as second:
        stage_backward_weight(iter(parameters.values()), groups)
    return Gradients({"x": gradient, **{name: leaf.grad for name, leaf in parameters.items()}}, [first, second])


def gradients_computed(executed: list[ExecutedOperators]) -> Counter[str]:
    """Number of calls of an operator; expert_ffn_backward counts once per gradient that it computes."""
    count: Counter[str] = Counter()
    for name, arguments in (call for operators in executed for call in operators.calls):
        if name == "expert_ffn_backward":
            count.update(f"{name} {number}" for number, wanted in enumerate(arguments["output_mask"]) if wanted)
        else:
            count[name] += 1
    return count


def assert_same_gradients_once_each(module: nn.Module, x: Tensor) -> None:
    expected, got = together(module, x), apart(module, x)
    for name, gradient in got.values.items():
        assert gradient is not None and torch.equal(gradient, expected.values[name]), name
    assert gradients_computed(got.executed) == gradients_computed(expected.executed)
    assert gradients_computed(got.executed[:1]), "the first half has computed nothing"
    assert gradients_computed(got.executed[1:]), "the second half has computed nothing"


# Each half of a backward computes the windows of a buffer again.
WHOLE = [name for name in COMPUTE if name != "windows"]
ROWS = pairwise([["muse_spark", "inkling", *FAMILIES], WHOLE, ["cpu", "aten"]])


@pytest.mark.parametrize(("name", "compute", "path"), ROWS, indirect=["path"])
def test_layer(path: str, name: str, compute: str) -> None:
    layer = make(**{**COMPUTE[compute], **LAYERS[name]})
    assert_same_gradients_once_each(layer, tokens(layer, 2, 9))


def block_and_tokens(recompute: tuple[str, ...] = ()) -> tuple[nn.Module, Tensor]:
    model = small_decoder.make()
    set_recompute(model, recompute)
    return model.blocks[1], torch.randn(2, 7, 12, dtype=torch.float64)


@pytest.mark.parametrize("recompute", [(), ("experts",), ("dispatch",), ("experts", "dispatch")], ids=str)
def test_block(path: str, recompute: tuple[str, ...]) -> None:
    assert_same_gradients_once_each(*block_and_tokens(recompute))
