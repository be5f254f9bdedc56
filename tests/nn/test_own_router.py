"""Custom routers, above all those of docs/how_to/router.md."""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import CheckpointError, checkpoint

import maxmoe
from maxmoe import MoE, MoEConfig
from maxmoe.nn import Routing, RoutingRecord
from nn.replayed_layers import recorded
from support.documented import ROUTERS
from support.slow_cases import by_default

E, D, F = 6, 8, 10
each_router = pytest.mark.parametrize("name", ROUTERS)


def make(name: str, **options: Any) -> MoE:
    """A layer in float64, whose values are the same at every call."""
    top_k, make_router = ROUTERS[name]
    fields = {"load_balance_loss_weight": 0.3, **options}
    config = MoEConfig(hidden_size=D, intermediate_size=F, num_experts=E, top_k=top_k(E), **fields)
    layer = MoE(config, router=make_router(config)).double()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for value in layer.state_dict().values():
            value.copy_(0.5 * torch.randn(value.shape, generator=generator, dtype=torch.float64))
    return layer


def tokens(*shape: int) -> Tensor:
    return torch.randn(*shape, D, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def by_definition(layer: MoE, x: Tensor) -> tuple[Tensor, Tensor, Routing]:
    """Output and balance loss from the result of the router, one token at a time."""
    routing = layer.router(x)
    experts = dict(layer.experts.named_parameters())
    rows = []
    for t, token in enumerate(x.flatten(0, 1)):
        row = torch.zeros_like(token)
        for weight, e in zip(routing.weights[t], routing.experts[t].tolist(), strict=True):
            if e >= 0:
                gate, up, down = (experts[f"{name}_proj"][e] for name in ("gate", "up", "down"))
                row = row + weight * ((functional.silu(token @ gate) * (token @ up)) @ down)
        rows.append(row)
    K, loss = layer.config.top_k, x.new_zeros(())
    for ids, probabilities in zip(
        routing.experts.view(*x.shape[:2], K), routing.probabilities.view(*x.shape[:2], E), strict=True
    ):
        frequency = torch.stack([(ids == e).sum().double() * E / (K * x.shape[1]) for e in range(E)])
        loss = loss + (frequency * probabilities.mean(0)).sum() / x.shape[0]
    if routing.token_losses is not None:
        return torch.stack(rows).view_as(x), 0.3 * loss + routing.token_losses.mean(), routing
    return torch.stack(rows).view_as(x), 0.3 * loss, routing


@each_router
@pytest.mark.parametrize("implementation", ["sparse", "dense"])
def test_is_its_definition(name: str, implementation: str) -> None:
    layer, x = make(name, implementation=implementation), tokens(3, 7)
    hidden_states, aux_loss, routing = by_definition(layer, x)
    output = layer(x)
    torch.testing.assert_close(output.hidden_states, hidden_states, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(output.aux_loss, aux_loss, rtol=1e-12, atol=1e-12)
    assert output.stats.tokens_per_expert.tolist() == [int((routing.experts == e).sum()) for e in range(E)]
    names, parameters = zip(*layer.named_parameters(), strict=True)
    cotangent = tokens(3, 7).flip(0)
    got = torch.autograd.grad((output.hidden_states * cotangent).sum() + output.aux_loss, parameters)
    expected = torch.autograd.grad((hidden_states * cotangent).sum() + aux_loss, parameters)
    for parameter, one, other in zip(names, got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-11, msg=lambda text, of=parameter: f"{of}: {text}")


@each_router
def test_padding(name: str) -> None:
    """Padding, which may be NaN, is not routed and does not change the outputs of other tokens."""
    layer, x = make(name), tokens(3, 7)
    lengths = [7, 4, 2] if name != "ExpertChoice" else [7, 7, 0]  # its capacity follows from the padded length
    mask = torch.arange(7) < torch.tensor(lengths).unsqueeze(1)
    output = layer(x.masked_fill(~mask.unsqueeze(2), torch.nan), mask)
    assert output.hidden_states[~mask].eq(0).all() and output.hidden_states.isfinite().all()
    losses, counts = [], torch.zeros(E, dtype=torch.int64)
    for row, length in enumerate(lengths):
        if length:
            alone = layer(x[row : row + 1, :length])
            torch.testing.assert_close(output.hidden_states[row, :length], alone.hidden_states[0])
            counts += alone.stats.tokens_per_expert
            losses.append(alone.aux_loss)
    assert output.stats.tokens_per_expert.equal(counts)
    if name != "ReLURouter":  # its loss is a mean over tokens, not over sequences
        torch.testing.assert_close(output.aux_loss, torch.stack(losses).mean())


@each_router
def test_replay(name: str) -> None:
    layer, x = make(name), tokens(3, 7)
    with maxmoe.record_routing(layer) as record:
        before = layer(x)
    with maxmoe.replay_routing(layer, record):
        torch.testing.assert_close(layer(x).hidden_states, before.hidden_states, rtol=0, atol=0)
    with torch.no_grad():
        layer.router.weight += 0.3 * torch.randn(E, D, generator=torch.Generator().manual_seed(2))
    with maxmoe.replay_routing(layer, record), maxmoe.record_routing(layer) as again:
        after = layer(x)
    assert not torch.equal(after.hidden_states, before.hidden_states)
    (ids,), (own,) = record.calls[""], recorded(layer, x).calls[""]
    assert torch.equal(ids, again.calls[""][0])
    is_missing = torch.arange(7).view(7, 1) < 2
    served = RoutingRecord({"": [ids.masked_fill(is_missing, -1)]})
    with maxmoe.replay_routing(layer, served, missing="natural"), maxmoe.record_routing(layer) as again:
        layer(x)
    assert torch.equal(again.calls[""][0], own.where(is_missing, ids))


@each_router
def test_a_recomputation_keeps_the_experts(name: str) -> None:
    """keep_routing keeps the experts even if a recomputation does not repeat the bits of its forward."""
    layer, noise = make(name), 1e-9 * tokens(3, 7).flip(0)
    weight = layer.router.weight.detach()
    x = tokens(3, 7) - tokens(3, 7) @ weight.T @ weight.T.pinverse()  # all scores are equal: noise decides
    calls: list[Tensor] = []
    layer.router.register_forward_hook(lambda _module, _arguments, routing: calls.append(routing.experts))

    def block(x: Tensor) -> Tensor:
        hidden_states: Tensor = layer(x + noise * (-1 if calls else 1)).hidden_states
        return hidden_states

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        calls.clear()
        leaf = x.clone().requires_grad_()
        (run(leaf) * tokens(3, 7).flip(1)).sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    expected = gradient(block)
    got = gradient(partial(checkpoint, block, use_reentrant=False, context_fn=maxmoe.keep_routing))
    assert len(calls) == 2 and calls[0].equal(calls[1])
    if name != "ReLURouter":  # its weights are not differentiable here
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    with suppress(CheckpointError):  # another number of slots
        gradient(partial(checkpoint, block, use_reentrant=False))
    assert len(calls) == 2 and not calls[0].equal(calls[1])


@pytest.mark.parametrize("name", by_default(ROUTERS, ["ExpertChoice"]))
def test_compiles_as_one_graph(name: str) -> None:
    torch._dynamo.reset()
    layer, x = make(name), tokens(3, 7)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for one, other in zip(compiled(x)[:2], layer(x)[:2], strict=True):
        torch.testing.assert_close(one, other)
