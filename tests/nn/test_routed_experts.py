"""A few tokens: one operator for router and experts, and no losses without gradients."""

from collections.abc import Callable
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


def test_whatever_observes_or_replaces_a_part_is_called() -> None:
    class OwnRouter(maxmoe.nn.Router):
        pass

    def hooked(layer: MoE) -> None:
        layer.experts.register_forward_pre_hook(lambda *_: None)

    def replaced_forward(layer: MoE) -> None:
        layer.experts.forward = layer.experts.forward  # type: ignore[method-assign]

    def derived_router(layer: MoE) -> None:
        layer.router.__class__ = OwnRouter

    def quantized_in_part(layer: MoE, name: str = "down_proj") -> None:
        stack = quantize(getattr(layer.experts, name).detach().float(), "int8")
        put_stack(layer.float().experts, name, stack)

    def quantized_gate(layer: MoE) -> None:
        quantized_in_part(layer, "gate_proj")

    for change in (hooked, replaced_forward, derived_router, quantized_in_part, quantized_gate):
        layer = make()
        assert "maxmoe::routed_experts" in called_operators(lambda layer=layer: layer(tokens(layer)))
        change(layer)
        names = called_operators(lambda layer=layer: layer(tokens(layer)))
        assert "maxmoe::routed_experts" not in names, change.__name__
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        assert "maxmoe::routed_experts" not in called_operators(lambda: layer(tokens(layer)))
    finally:
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
