"""Replayed routing under `torch.utils.checkpoint`: a recomputation takes the experts of its forward."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE
from maxmoe.nn import RoutingRecord
from support.moe_layers import FAMILIES, make, tokens
from support.replayed_layers import moved, recorded


def gradients(model: torch.nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    run().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("options", [{}, {"context_fn": maxmoe.keep_routing}], ids=["plain", "keep_routing"])
def test_a_recomputation_takes_the_experts_of_its_forward(options: dict[str, Any]) -> None:
    """Bit for bit, over the micro-batches of an accumulated gradient."""
    layer = moved(before := make(**FAMILIES["deepseek"]))
    batches = [tokens(layer), tokens(layer), tokens(layer)]
    with maxmoe.record_routing(before) as record:
        for x in batches:
            before(x)

    def each_backward(run: Callable[[Tensor], Any]) -> dict[str, Tensor]:
        layer.zero_grad()
        with maxmoe.replay_routing(layer, record):
            for x in batches:
                run(x).hidden_states.square().sum().backward()
        return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}

    expected = each_backward(layer)
    got = each_backward(lambda x: checkpoint(layer, x, use_reentrant=False, **options))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


@pytest.mark.parametrize("options", [{}, {"context_fn": maxmoe.keep_routing}], ids=["plain", "keep_routing"])
def test_forwards_that_wait_together(options: dict[str, Any]) -> None:
    """Two forwards, then backwards through both: autograd recomputes them in an order of its own."""
    layer = moved(before := make())
    batches = [tokens(layer), tokens(layer)]
    with maxmoe.record_routing(before) as record:
        for x in batches:
            before(x)

    def loss(run: Callable[[Tensor], Any]) -> Tensor:
        return torch.stack([run(x).hidden_states.square().sum() for x in batches]).sum()

    def checkpointed(x: Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=False, **options)

    with maxmoe.replay_routing(layer, record):
        expected = gradients(layer, lambda: loss(layer))
    with maxmoe.replay_routing(layer, record):
        got = gradients(layer, lambda: loss(checkpointed))
    with maxmoe.replay_routing(layer, record):
        later = loss(checkpointed)
    afterwards = gradients(layer, lambda: later)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert all(torch.equal(afterwards[name], expected[name]) for name in expected)


def shared_twice(layer: MoE, x: Tensor) -> Tensor:
    return layer(layer(x).hidden_states.sin()).hidden_states.square().sum()


def test_backwards_after_the_replay() -> None:
    """Of a block that calls its layer twice, two backwards, beside a forward that is not replayed."""
    layer = moved(before := make())
    x, other = tokens(layer), tokens(layer)
    with maxmoe.record_routing(before) as record:
        shared_twice(before, x)

    def losses(block: Callable[[Tensor], Any]) -> tuple[Tensor, Tensor]:
        with maxmoe.replay_routing(layer, record):
            replayed = block(x)
        return replayed, block(other)

    def twice(replayed: Tensor, routed: Tensor) -> dict[str, Tensor]:
        layer.zero_grad()
        replayed.backward(retain_graph=True)
        (replayed + 3 * routed).backward()
        return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}

    expected = twice(*losses(lambda x: shared_twice(layer, x)))
    got = twice(*losses(lambda x: checkpoint(shared_twice, layer, x, use_reentrant=False)))
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-12, atol=1e-13)
    layer(x)
    assert not layer.router._forward_pre_hooks


def nested(layer: MoE, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False).hidden_states.sin()

    return checkpoint(inner, x, use_reentrant=False).square().sum()


def test_nested_checkpoints() -> None:
    """One forward is replayed; several cannot be told apart, nor can one after the replay."""
    layer = moved(before := make())
    x = tokens(layer)
    record = recorded(before, x)
    with maxmoe.replay_routing(layer, record):
        expected = gradients(layer, lambda: layer(x).hidden_states.sin().square().sum())
    with maxmoe.replay_routing(layer, record):
        got = gradients(layer, lambda: nested(layer, x))
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    twice = RoutingRecord({"": record.calls[""] * 2})
    message = "^2 calls of the layer wait for a backward, and it is not known which of them is recomputed"
    with pytest.raises(ValueError, match=message), maxmoe.replay_routing(layer, twice):
        (nested(layer, x) + nested(layer, x)).backward()
    with maxmoe.replay_routing(layer, record):
        later = nested(layer, x)
    message = "^the layer is in nested checkpoints: run the backward before the replay ends$"
    with pytest.raises(ValueError, match=message):
        later.backward()


def test_a_reentrant_checkpoint_is_refused() -> None:
    layer, x = make(), tokens(make()).requires_grad_()
    record, message = recorded(layer, x), r"^the layer cannot be replayed in a checkpoint with use_reentrant=True"
    with pytest.raises(ValueError, match=message), maxmoe.replay_routing(layer, record):
        checkpoint(layer, x, use_reentrant=True)
    with maxmoe.replay_routing(layer, record), torch.no_grad():
        layer(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # see test_replay.py
def test_a_compiled_layer_in_a_checkpoint() -> None:
    """Compiled before the replay; the backward runs during the replay, and after it."""
    layer = moved(before := make())
    x = tokens(layer)
    record = recorded(before, x)
    compiled = torch.compile(layer, backend="aot_eager", dynamic=False)
    compiled(x).hidden_states.sum().backward()

    def loss() -> Tensor:
        return checkpoint(compiled, x, use_reentrant=False).hidden_states.square().sum()

    with maxmoe.replay_routing(layer, record):
        expected = gradients(layer, lambda: layer(x).hidden_states.square().sum())
    with maxmoe.record_routing(layer) as again, maxmoe.replay_routing(layer, record):
        got = gradients(layer, loss)
    assert len(again) == 1
    with maxmoe.replay_routing(layer, record):
        later = loss()
    afterwards = gradients(layer, lambda: later)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(afterwards[name], expected[name], rtol=1e-12, atol=1e-13)
