"""A few tokens: one operator for router and experts, and no losses without gradients."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxmoe
from maxmoe import MoE, MoEFeedForward
from maxmoe.quantization import put_stack, quantize
from support.moe_layers import LOSSES, Options, each_family, make, tokens
from support.shapes import each_dtype


def flat(output: Any) -> list[Tensor]:
    return [output[0], output.aux_loss, *output.stats[:3]]


def called_operators(function: Callable[[], object]) -> list[str]:
    with torch.profiler.profile() as profile:
        function()
    return [event.name for event in profile.events() if event.name.startswith(("aten::", "maxmoe::"))]


@each_family
@each_dtype
def test_the_operator_gives_the_bits_of_the_modules(path: str, dtype: torch.dtype, options: Options) -> None:
    layer = make(dtype, **options)
    x = tokens(layer, 2, 3)
    x_of_modules = x.clone()
    results = []
    for hooks in ([], [layer.router.register_forward_hook(lambda *_: None)]):  # with a hook, the modules are called
        output = layer(x.requires_grad_())
        gradients = torch.autograd.grad(output.hidden_states.square().sum() + output.aux_loss, [x, *layer.parameters()])
        with torch.no_grad():
            results.append([*flat(output), *gradients, *flat(layer(x_of_modules))])
        for hook in hooks:
            hook.remove()
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


class OwnRouter(maxmoe.nn.Router):
    """A router that may do anything."""


def quantized_in_part(name: str, layer: MoE) -> None:
    stack = quantize(getattr(layer.experts, name).detach().float(), "int8")
    put_stack(layer.float().experts, name, stack)


def hooked(kind: str, layer: MoE) -> Any:
    """With a hook on the experts, or on all modules."""
    registers = nn.modules.module if "module" in kind else layer.experts
    return getattr(registers, f"register_{kind}_hook")(lambda *_: None)


HOOKS = ("forward", "forward_pre", "full_backward", "full_backward_pre", "module_forward", "module_forward_pre")
CHANGES: list[Callable[[MoE], Any]] = [
    *(partial(hooked, kind) for kind in (*HOOKS, "module_full_backward")),
    *(partial(quantized_in_part, name) for name in ("down_proj", "gate_proj")),
    lambda layer: setattr(layer.experts, "forward", layer.experts.forward),
    lambda layer: setattr(layer.router, "__class__", OwnRouter),
]


@pytest.mark.parametrize("change", CHANGES)
def test_whatever_observes_or_replaces_a_part_is_called(change: Callable[[MoE], Any]) -> None:
    layer = make()
    assert "maxmoe::routed_experts" in called_operators(lambda: layer(tokens(layer)))
    handle = change(layer)
    try:
        assert "maxmoe::routed_experts" not in called_operators(lambda: layer(tokens(layer)))
    finally:
        if handle is not None:
            handle.remove()


def test_an_error_names_its_part() -> None:
    model = nn.Sequential(make())
    model[0].experts.gate_proj = nn.Parameter(model[0].experts.gate_proj[:, :-1])
    with pytest.raises(ValueError, match=r"^0\.experts: maxmoe::expert_ffn: gate must"):
        model(tokens(model[0], 1, 1))


def test_nothing_is_computed_that_nobody_reads() -> None:
    layer = MoEFeedForward(make(**LOSSES).config, dtype=torch.float64)
    x = tokens(layer)
    with torch.no_grad():
        names = called_operators(lambda: layer(x))
        assert "maxmoe::routed_experts" in names
        assert not {"aten::scatter_add", "maxmoe::router_entropy", "aten::logsumexp"} & {*names}
    assert "aten::scatter_add" in called_operators(lambda: layer(x))


def test_statistics_are_ordinary_tuples() -> None:
    """Statistics are tuples without gradients, too, because code in C such as "%" reads the fields directly."""
    with torch.no_grad():
        stats = make()(tokens(make())).stats
    fields = (stats.tokens_per_expert, stats.dropped, stats.router_entropy)
    assert "%s %s %s" % stats == " ".join(map(str, fields))  # noqa: UP031
