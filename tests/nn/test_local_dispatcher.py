"""Slots that a capacity or a buffer drops, by hand; test_moe.py compares all numbers with the specification."""

from typing import Any

import pytest
import torch

from maxmoe import MoE
from maxmoe.nn.local_dispatcher import LocalCounts
from support.moe_layers import COMPUTE, LOSSES, Options, assert_meets_specification, make, outcome, tokens


def first_entry_chooses(**options: Any) -> MoE:
    """Tokens with a positive first entry go to expert 0, the others to expert 1."""
    layer = make(hidden_size=3, num_experts=2, top_k=1, normalization="none", **options)
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[:, 0] = torch.tensor([1.0, -1.0])
    return layer


def test_capacity_drops_the_last_tokens_of_an_expert_in_each_sequence() -> None:
    layer = first_entry_chooses(implementation="dense", capacity_factor=1.0)
    x = tokens(layer, 2, 4)
    x[..., 0] = torch.tensor([[1.0, 1.0, -1.0, 1.0], [-1.0, 1.0, -1.0, 1.0]])
    everything = first_entry_chooses()
    everything.load_state_dict(layer.state_dict())
    hidden_states, _, stats = layer(x)
    # Two places for each of the two experts: the third token of expert 0 in the first sequence has none.
    assert (stats.dropped.item(), stats.tokens_per_expert.tolist()) == (1, [5, 3])
    assert not hidden_states[0, 3].any()
    kept = torch.ones(2, 4, dtype=torch.bool)
    kept[0, 3] = False
    # The others keep their weights.
    torch.testing.assert_close(hidden_states[kept], everything(x).hidden_states[kept])
    # As one sequence of eight there are four places for each, and five tokens for expert 0.
    assert layer(x.flatten(0, 1)).stats.dropped == 1
    assert not layer(x.flatten(0, 1)).hidden_states[7].any()


def test_capacity_beyond_the_slots_of_a_sequence_costs_nothing() -> None:
    """A sequence of one token has two slots: the buffer has two rows per expert, not the capacity of 64."""
    layer = make(implementation="dense", num_experts=64, top_k=2, capacity_factor=64.0)
    x = tokens(layer, 3, 1)
    top_k = layer.router(x.flatten(0, 1)).top_k
    dispatched = layer.runner.dispatcher.dispatch(x.flatten(0, 1), top_k, LocalCounts(3))()
    assert dispatched.x.shape[0] == 64 * 3 * 2 and dispatched.dropped == 0
    assert_meets_specification(layer, x)


@pytest.mark.parametrize("factor", [0.2, 0.99, 1.0])
def test_buffer_drops_the_last_experts_and_counts(path: str, factor: float) -> None:
    layer = make(buffer_factor=factor, **LOSSES)
    x = tokens(layer, 2, 5)
    stats = layer(x).stats
    assert stats.dropped == 30 - int(30 * factor)
    kept = (stats.tokens_per_expert.cumsum(0) - stats.tokens_per_expert) < int(30 * factor)
    gradient = outcome(layer, x).gradients["experts.down_proj"]
    assert gradient is not None
    assert torch.equal(gradient.flatten(1).any(1), kept & (stats.tokens_per_expert > 0))


@pytest.mark.parametrize("compute", [COMPUTE["buffer"], COMPUTE["capacity"]], ids=["buffer", "capacity"])
def test_dropped_tokens_pass_nothing_on(compute: Options) -> None:
    """Dropped tokens get no output and no gradient, except from the shared expert."""
    layer = first_entry_chooses(num_shared_experts=1, **compute)
    x = tokens(layer, 1, 10).requires_grad_()
    with torch.no_grad():
        x[..., 0] = -1.0
    hidden_states, _, stats = layer(x)
    first_dropped = 10 - int(stats.dropped)
    assert 0 < first_dropped < 10
    shared = layer.shared_experts(x.flatten(0, 1))
    torch.testing.assert_close(hidden_states[0, first_dropped:], shared[first_dropped:])
    cotangent = torch.randn_like(hidden_states)
    cotangent[:, :first_dropped] = 0.0
    parameters = [layer.router.weight, layer.experts.up_proj]
    of_x, *gradients = torch.autograd.grad(hidden_states, [x, *parameters], cotangent)
    torch.testing.assert_close(of_x, torch.autograd.grad(shared, x, cotangent[0])[0])
    assert not any(gradient.any() for gradient in gradients)
