"""A few tokens without gradients: one operator, and losses and statistics that are computed when they are read."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import maxmoe
from maxmoe import MoE, MoEFeedForward
from maxmoe.models import Decoder
from maxmoe.nn import Routing, routing_losses
from support.moe_layers import DEEPSEEK, Options, each_family, make, tokens
from support.shapes import each_dtype
from support.small_decoder import make as make_decoder
from support.small_decoder import tokens_like

LOSSES = {"load_balance_loss_weight": 0.3, "router_z_loss_weight": 0.2}


def flat(output: Any) -> list[Tensor]:
    return [output[0], output.aux_loss, *output.stats]


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

    def nothing(_layer: MoE) -> None:
        pass

    for change, is_one_operator in (
        (nothing, True),
        (hooked, False),
        (replaced_forward, False),
        (derived_router, False),
    ):
        layer = make()
        change(layer)
        names = called_operators(lambda layer=layer: layer(tokens(layer)))
        assert ("maxmoe::routed_experts" in names) == is_one_operator, change.__name__
    handle = nn.modules.module.register_module_forward_pre_hook(lambda *_: None)
    try:
        assert "maxmoe::routed_experts" not in called_operators(lambda: layer(tokens(layer)))
    finally:
        handle.remove()


def test_an_error_names_the_router() -> None:
    model = nn.Sequential(make())
    with pytest.raises(ValueError, match=r"^0\.router: .*NaN for token 0"):
        model(torch.full((1, 1, model[0].config.hidden_size), torch.nan, dtype=torch.float64))


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_deferred_values_have_the_bits_of_those_computed_at_once(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make(**DEEPSEEK | LOSSES, load_balance_scope=scope)
    x, mask = tokens(layer, 2, 3), torch.tensor([[1, 1, 0], [0, 1, 1]]).bool()
    for arguments in ((x,), (x, mask)):
        with torch.no_grad():
            later = layer(*arguments)
            monkeypatch.setattr(routing_losses, "MAX_DEFERRED_SIZE", 0)
            now = layer(*arguments)
            monkeypatch.undo()
        assert type(now.stats) is maxmoe.MoEStats and type(later.stats) is not maxmoe.MoEStats
        assert all(torch.equal(one, other) for one, other in zip(flat(later), flat(now), strict=True))
        hidden_states, aux_loss, stats = later
        assert torch.equal(hidden_states, now.hidden_states) and torch.equal(aux_loss, now.aux_loss)
        assert torch.equal(stats.router_entropy, now.stats.router_entropy)


class TableRouter(nn.Module):
    """A router of one's own that returns tensors which it holds."""

    def __init__(self, config: maxmoe.MoEConfig) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        shape = (2, 3, config.num_experts)
        self.logits = torch.randn(shape, generator=generator, dtype=torch.float64)
        self.probabilities = self.logits.softmax(-1)
        weights, self.ids = self.probabilities.topk(config.top_k)
        self.weights = weights

    def forward(self, _x: Tensor, token_mask: Tensor | None = None) -> Routing:
        return Routing.of(
            experts=self.ids,
            weights=self.weights,
            probabilities=self.probabilities,
            logits=self.logits,
            token_mask=token_mask,
        )


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("kind", ["plain", "hooked", "own router"])
def test_deferred_values_are_those_of_the_call(kind: str, with_mask: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever happens in between to tensors that others hold: the mask, and what a hook or a router has seen."""
    layer = MoEFeedForward(make(**LOSSES).config, dtype=torch.float64)
    held: list[Tensor] = []
    x, mask = tokens(layer, 2, 3), torch.tensor([[1, 1, 0], [0, 1, 1]]).bool() if with_mask else None
    if kind == "own router":
        layer = MoEFeedForward(layer.config, router=(router := TableRouter(layer.config)), dtype=torch.float64)
        held += (router.logits, router.probabilities, router.ids)
    elif kind == "hooked":
        layer.router.register_forward_hook(lambda _module, _arguments, routing: held.extend(routing[:4]))
    with torch.no_grad():
        with monkeypatch.context() as patch:
            patch.setattr(routing_losses, "MAX_DEFERRED_SIZE", 0)
            now = layer.output_and_metrics(x, mask)[1]
        metrics = [layer.output_and_metrics(x, mask)[1] for _ in range(2)]
        assert type(metrics[0]) is not routing_losses.RoutingMetrics
        for tensor in held if mask is None else [*held, mask]:
            tensor.fill_(1)
        for later in metrics:
            for one, other in zip((later.aux_loss, *later.stats), (now.aux_loss, *now.stats), strict=True):
                assert torch.equal(one, other)


def test_nothing_is_computed_that_nobody_reads() -> None:
    layer = MoEFeedForward(make(**LOSSES).config, dtype=torch.float64)
    x = tokens(layer)
    with torch.no_grad():
        names = called_operators(lambda: layer(x))
        assert "maxmoe::routed_experts" in names and not {"aten::scatter_add", "aten::log_", "aten::logsumexp"} & {
            *names
        }
        names = called_operators(lambda: MoE.forward(layer, x))  # whose auxiliary loss is a tensor
        assert "aten::logsumexp" in names and "aten::neg" not in names
        assert "aten::neg" in called_operators(lambda: MoE.forward(layer, x).stats.dropped)
    assert "aten::scatter_add" in called_operators(lambda: layer(x))


def test_a_decoder_computes_statistics_when_they_are_read() -> None:
    model: Decoder = make_decoder()
    x = tokens_like(model)
    expected = model(x)
    with torch.no_grad():
        output = model(x)
        assert "aten::log_" not in called_operators(lambda: model(x))
    assert torch.equal(output.logits, expected.logits) and torch.equal(output.aux_loss, expected.aux_loss)
    assert torch.equal(output.tokens_per_expert, expected.tokens_per_expert)


def test_later_steps_do_not_change_a_loss_over_the_step() -> None:
    """The counts of the step move on, so that the loss is computed at once."""
    layer = make(load_balance_loss_weight=0.3, load_balance_scope="step")
    maxmoe.StatsAccumulator(layer)
    x = tokens(layer)
    with torch.no_grad():
        output, expected = layer(x), layer(x).aux_loss
    hidden_states, aux_loss, _ = layer(x[:1])
    (hidden_states.sum() + aux_loss).backward()
    with torch.no_grad():
        assert torch.equal(output.aux_loss, expected) and not torch.equal(layer(x).aux_loss, expected)
