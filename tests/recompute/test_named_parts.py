"""`set_recompute`: the parts of a model by name, the tensors that they keep, and unknown names."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import maxmoe
from maxmoe.nn import Checkpointed, recompute_of
from support.memory import num_bytes, saved_for_backward
from support.moe_layers import COMPUTE, EVERYTHING, LLAMA4, Options, make, outcome, tokens
from support.operator_calls import assert_same
from support.operator_checks import ExecutedOperators

LAYERS: dict[str, Options] = {
    "every part": EVERYTHING,
    "llama4": LLAMA4,
    "dense": {**COMPUTE["dense"], "expert_bias": True},
    "capacity, weights on the input": {**COMPUTE["capacity"], "apply_weights_to": "input"},
}


def names_of(layer: nn.Module) -> set[str]:
    return {name for module in layer.modules() for name in getattr(module, "recompute_names", ())}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_a_layer_gives_the_same_bits_and_keeps_less(path: str, dtype: torch.dtype, options: Options) -> None:
    layer = make(dtype, **options)
    x = tokens(layer, 2, 9)

    def kept() -> int:
        leaf = x.clone().requires_grad_()
        with saved_for_backward([leaf, *layer.parameters()]) as saved:
            output = layer(leaf)
        assert output.hidden_states.requires_grad
        return num_bytes(saved)

    expected, usual = outcome(layer, x), kept()
    for name in sorted(names_of(layer)):
        maxmoe.set_recompute(layer, (name,))
        assert_same(outcome(layer, x), expected)
        moves = "implementation" in options or options.get("apply_weights_to") == "input"
        assert kept() < usual if name != "dispatch" or moves else kept() == usual, name
    maxmoe.set_recompute(layer, names_of(layer))
    assert_same(outcome(layer, x), expected)
    maxmoe.set_recompute(layer, ())
    assert kept() == usual


@pytest.mark.parametrize("options", [LLAMA4, COMPUTE["dense"]], ids=["llama4", "dense"])
def test_activation_checkpointing_keeps_its_arguments_only(options: Options) -> None:
    layer = make(**options)
    maxmoe.set_recompute(layer, ("dispatch",))
    kept: list[StorageWeakRef] = []

    def block(x: Tensor) -> Tensor:
        x = torch.tanh(x)
        kept.append(StorageWeakRef(x.untyped_storage()))
        hidden_states: Tensor = layer(x).hidden_states
        return hidden_states

    output = torch.utils.checkpoint.checkpoint(block, tokens(layer).requires_grad_(), use_reentrant=False)
    assert output.requires_grad and kept[0].expired()


def test_routes_once_and_computes_down_once() -> None:
    """The dense implementation calls products of torch, which can be counted: three, then gate and up again."""
    layer, counts = make(implementation="dense"), []
    for names in ((), ("experts",)):
        maxmoe.set_recompute(layer, names)
        with ExecutedOperators() as products:
            outcome(layer, tokens(layer))
        counts.append(products.times)
    usual, recomputed = counts
    assert recomputed["aten.bmm.default"] == usual["aten.bmm.default"] + 2
    assert recomputed["maxmoe.route.default"] == usual["maxmoe.route.default"] == 1


class Scaled(Checkpointed):
    recompute_names = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.calls = nn.Parameter(torch.tensor(2.0)), 0

    def forward(self, x: Tensor, *, power: int = 1) -> Tensor:
        self.calls += 1
        return (x * self.factor).sin() ** power


def test_a_module_of_ones_own() -> None:
    model = nn.Sequential(Scaled(), nn.Linear(3, 3))
    x = torch.randn(4, 3)
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    maxmoe.set_recompute(model, ["scale"])
    assert recompute_of(model) == {"scale"} and model[0].calls == 1
    for one, other in zip(torch.autograd.grad(model(x).sum(), list(model.parameters())), expected, strict=True):
        assert torch.equal(one, other)
    assert model[0].calls == 3
    with torch.no_grad():
        model[0](x, power=2)
    assert model[0].calls == 4


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (("expert",), ValueError, "of this model, got 'expert'; the nearest are 'experts'$"),
        (("shared_experts",), ValueError, "got 'shared_experts'; the nearest are 'experts'$"),
        (("moon",), ValueError, "got 'moon'; there are 'dispatch', 'experts'$"),
        ((3,), ValueError, "got 3; there are 'dispatch', 'experts'$"),
        ("experts", TypeError, "must be a tuple of names, got the str 'experts'"),
    ],
    ids=str,
)
def test_names_of_nothing(names: Any, error: type[Exception], message: str) -> None:
    layer = make()
    maxmoe.set_recompute(layer, ("dispatch",))
    with pytest.raises(error, match=message):
        maxmoe.set_recompute(layer, names)
    assert recompute_of(layer) == {"dispatch"}


def test_a_model_without_parts() -> None:
    with pytest.raises(ValueError, match="this model, got 'experts'; there are none"):
        maxmoe.set_recompute(nn.Linear(3, 3), ("experts",))


def test_a_part_inside_of_another() -> None:
    class Outer(Checkpointed):
        recompute_names = ("outer",)

        def __init__(self) -> None:
            super().__init__()
            self.inner = Scaled()

    message = "recompute has 'outer', which recomputes 0.inner already, and 'scale': choose one of the two"
    with pytest.raises(ValueError, match=message):
        maxmoe.set_recompute(nn.Sequential(Outer()), ("scale", "outer"))
