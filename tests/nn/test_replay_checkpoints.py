"""Replayed routing under `torch.utils.checkpoint`: a recomputation takes the experts of its forward."""

import copy
import io
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE
from nn.replayed_layers import moved, recorded
from support.moe_layers import FAMILIES, make, tokens
from support.pairwise import pairwise

Forward = Callable[[MoE, Tensor], Tensor]


def gradients(model: torch.nn.Module, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    model.zero_grad()
    run().backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


each_checkpoint = pytest.mark.parametrize(
    "options", [{}, {"context_fn": maxmoe.keep_routing}], ids=["plain", "keep_routing"]
)


@each_checkpoint
@pytest.mark.parametrize("backward", ["after each forward", "together", "after the replay"])
def test_a_recomputation_takes_the_experts_of_its_forward(backward: str, options: dict[str, Any]) -> None:
    """Bit for bit. In a backward through all forwards, autograd chooses the order of the recomputations."""
    layer = moved(before := make(**FAMILIES["deepseek"]))
    batches = [tokens(layer) for _ in range(3)]
    with maxmoe.record_routing(before) as record:
        for x in batches:
            before(x)

    def trained(run: Callable[[Tensor], Any]) -> dict[str, Tensor]:
        layer.zero_grad()
        losses = []
        with maxmoe.replay_routing(layer, record):
            for x in batches:
                losses.append(run(x).hidden_states.square().sum())
                if backward == "after each forward":
                    losses.pop().backward()
            if backward == "together":
                torch.stack(losses).sum().backward()
        if backward == "after the replay":
            torch.stack(losses).sum().backward()
        return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}

    expected = trained(layer)
    got = trained(lambda x: checkpoint(layer, x, use_reentrant=False, **options))
    assert all(torch.equal(got[name], expected[name]) for name in expected)


def shared_twice(layer: MoE, x: Tensor) -> Tensor:
    return layer(layer(x).hidden_states.sin()).hidden_states.square().sum()


def test_backwards_after_the_replay() -> None:
    """Two backwards of a block that calls its layer twice, beside a forward that is not replayed."""
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
    assert not layer.routing_hooks


def test_copies_and_pickles_have_no_part_in_a_replay() -> None:
    """A copy made while routing is recorded or replayed, and a model saved while a checkpointed graph exists."""
    layer = moved(before := make())
    x = tokens(layer)
    record = recorded(before, x)
    copies = []
    with maxmoe.record_routing(layer) as again, maxmoe.replay_routing(layer, record):
        copies.append(copy.deepcopy(layer))
        graph = checkpointed(layer, x)
        copies += [copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))]
    torch.save(layer, file := io.BytesIO())
    file.seek(0)
    copies.append(torch.load(file, weights_only=False))
    expected = layer(x)
    for each in copies:
        assert each(x).hidden_states.equal(expected.hidden_states) and not each.routing_hooks
        each(x)
    assert len(again) == 1 and graph.requires_grad


def nested(layer: MoE, x: Tensor) -> Tensor:
    def inner(x: Tensor) -> Tensor:
        return checkpoint(layer, x, use_reentrant=False).hidden_states.sin()

    return checkpoint(inner, x, use_reentrant=False)


def on_cpu(layer: MoE, x: Tensor) -> Tensor:
    """Hooks on saved tensors between checkpoint and layer."""

    def inner(x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            hidden_states = layer(x).hidden_states
        return hidden_states.sin()

    return checkpoint(inner, x, use_reentrant=False)


def checkpointed(layer: MoE, x: Tensor) -> Tensor:
    return checkpoint(lambda x: layer(x).hidden_states.sin(), x, use_reentrant=False)


def uncheckpointed(layer: MoE, x: Tensor) -> Tensor:
    return layer(x).hidden_states.sin()


FORWARDS = [uncheckpointed, checkpointed, nested, on_cpu]


@pytest.mark.parametrize(("first", "second", "is_replayed"), pairwise([FORWARDS, FORWARDS, [True, False]]))
def test_a_backward_in_another_replay(first: Forward, second: Forward, is_replayed: bool) -> None:
    """Each forward is recomputed with its own experts, wherever its backward runs."""
    layer = moved(before := make())
    one, other = tokens(layer), tokens(layer)
    records = recorded(before, one), recorded(before, other)

    def losses(first: Forward, second: Forward, *, inside: bool) -> dict[str, Tensor]:
        layer.zero_grad()
        with maxmoe.replay_routing(layer, records[0]) if is_replayed else nullcontext():
            loss = first(layer, one).square().sum()
        with maxmoe.replay_routing(layer, records[1]):
            loss = loss + second(layer, other).sum()
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        return {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}

    expected = losses(uncheckpointed, uncheckpointed, inside=False)
    for inside in (True, False):
        got = losses(first, second, inside=inside)
        for name in expected:
            torch.testing.assert_close(got[name], expected[name], rtol=1e-12, atol=1e-13)


def test_other_recomputations_are_refused() -> None:
    layer, x = make(), tokens(make())
    record = recorded(layer, x)
    leaf = torch.ones(1, requires_grad=True)
    with maxmoe.replay_routing(layer, record):
        layer(x)
        leaf.register_hook(lambda _: layer(x))
        with pytest.raises(ValueError, match=r"^the layer is recomputed, but the recorded call is not known: "):
            leaf.sum().backward()


def test_a_reentrant_checkpoint_is_refused() -> None:
    layer, x = make(), tokens(make()).requires_grad_()
    record, message = recorded(layer, x), r"^the layer cannot be replayed in a checkpoint with use_reentrant=True"
    with pytest.raises(ValueError, match=message), maxmoe.replay_routing(layer, record):
        checkpoint(layer, x, use_reentrant=True)
    with maxmoe.replay_routing(layer, record), torch.no_grad():
        layer(x)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_a_compiled_layer_in_a_checkpoint() -> None:
    """Compiled before the replay; the backward runs during the replay, and after it."""
    torch._dynamo.reset()
    layer = moved(before := make())
    x = tokens(layer)
    record = recorded(before, x)
    compiled = torch.compile(layer, backend="eager", dynamic=False)
    compiled(x).hidden_states.sum().backward()

    def loss() -> Tensor:
        return checkpoint(compiled, x, use_reentrant=False).hidden_states.square().sum()

    with maxmoe.replay_routing(layer, record):
        expected = gradients(layer, lambda: layer(x).hidden_states.square().sum())
    with maxmoe.record_routing(compiled) as again, maxmoe.replay_routing(compiled, record):
        got = gradients(layer, loss)
    assert len(again) == 1 and again.calls.keys() == record.calls.keys()  # not the names of wrappers
    assert torch.equal(again.calls[""][0], record.calls[""][0])
    with maxmoe.replay_routing(layer, record):
        later = loss()
    afterwards = gradients(layer, lambda: later)
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-12, atol=1e-13)
        torch.testing.assert_close(afterwards[name], expected[name], rtol=1e-12, atol=1e-13)


@each_checkpoint
def test_a_record_does_not_change_how_a_forward_before_it_is_recomputed(options: dict[str, Any]) -> None:
    layer, x = make(), tokens(make())
    expected = gradients(layer, lambda: layer(x).hidden_states.square().sum())
    loss = checkpoint(layer, x, use_reentrant=False, **options).hidden_states.square().sum()
    with maxmoe.record_routing(layer) as record:
        got = gradients(layer, lambda: loss)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert not record.calls[""]
