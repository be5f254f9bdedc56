"""Surgery with an optimizer: training continues as if the removed experts had never existed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import Optimizer

from maxmoe import MoE
from maxmoe.convert.surgery import duplicate_experts, merge_experts, prune_experts
from maxmoe.optim import Muon, parameter_groups
from support.moe_layers import make, tokens

OPTIMIZERS: dict[str, Callable[[MoE], Optimizer]] = {
    "adamw": lambda layer: torch.optim.AdamW(layer.parameters(), lr=1e-2),
    "amsgrad": lambda layer: torch.optim.AdamW(layer.parameters(), lr=1e-2, amsgrad=True),
    "sgd": lambda layer: torch.optim.SGD(layer.parameters(), lr=1e-2, momentum=0.9),
    "muon": lambda layer: Muon(parameter_groups(layer), lr=1e-2),
}
# Its factored moments have a row for each expert, but it mixes experts in the learning rate of a parameter.
ADAFACTOR: Callable[[MoE], Optimizer] = lambda layer: torch.optim.Adafactor(layer.parameters(), lr=1e-2)  # noqa: E731
each_optimizer = pytest.mark.parametrize("make_optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)


def train(layer: MoE, optimizer: Optimizer, batches: list[Tensor]) -> None:
    for x in batches:
        layer(x).hidden_states.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


@each_optimizer
def test_training_goes_on_as_without_the_pruned_experts(make_optimizer: Callable[[MoE], Optimizer]) -> None:
    """No token selects experts 1 and 4, so that their presence changes nothing for the others."""
    torch.manual_seed(0)
    layer = make(router_bias=True, expert_bias=True, score_function="sigmoid")
    with torch.no_grad():
        layer.router.bias[[1, 4]] = -1e3
    batches = [tokens(layer) for _ in range(6)]
    optimizer = make_optimizer(layer)
    train(layer, optimizer, batches[:3])
    whole, state = copy.deepcopy(layer), copy.deepcopy(optimizer.state_dict())
    prune_experts(layer, [1, 4], optimizer=optimizer)
    train(layer, optimizer, batches[3:])
    of_whole = make_optimizer(whole)
    of_whole.load_state_dict(state)
    train(whole, of_whole, batches[3:])
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(parameter, whole.get_parameter(name)[[0, 2, 3, 5]], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("make_optimizer", [*OPTIMIZERS.values(), ADAFACTOR], ids=[*OPTIMIZERS, "adafactor"])
def test_parameters_and_moments_are_copied_and_averaged(make_optimizer: Callable[[MoE], Optimizer]) -> None:
    """Copies come after their originals, and means take the place of the first of their experts."""
    layer = make(expert_bias=True, router_bias=True)
    optimizer = make_optimizer(layer)
    train(layer, optimizer, [tokens(layer) for _ in range(2)])
    before = values(layer, optimizer)
    duplicate_experts(layer, [2], optimizer=optimizer)
    copied = values(layer, optimizer)
    merge_experts(layer, [[0, 6]], optimizer=optimizer)
    merged = values(layer, optimizer)
    assert before.keys() == copied.keys() == merged.keys() and before
    for key, value in before.items():
        if value.dim() == 0:
            assert torch.equal(copied[key], value) and torch.equal(merged[key], value)
            continue
        if value.shape[0] == 1:  # Adafactor's mean over the experts
            continue
        assert torch.equal(copied[key], value[[0, 1, 2, 2, 3, 4, 5]])
        expected = torch.cat([(value[:1] + value[5:]) / 2, value[[1, 2, 2, 3, 4]]])
        torch.testing.assert_close(merged[key], expected)


def values(layer: MoE, optimizer: Optimizer) -> dict[Any, Tensor]:
    """Parameters and moments."""
    return {
        (name, key): value.clone()
        for name, parameter in layer.named_parameters()
        for key, value in [("itself", parameter.detach()), *optimizer.state[parameter].items()]
    }


@each_optimizer
def test_a_checkpoint_is_that_of_the_new_config(make_optimizer: Callable[[MoE], Optimizer]) -> None:
    """A new layer of the config, with a new optimizer, loads it and continues with the same bits."""
    layer = make()
    optimizer = make_optimizer(layer)
    train(layer, optimizer, [tokens(layer)])
    duplicate_experts(layer, [0, 3], top_k=4, optimizer=optimizer)
    merge_experts(layer, [[2, 5, 6]], optimizer=optimizer)
    train(layer, optimizer, [tokens(layer)])
    other = MoE(layer.config, dtype=torch.float64)
    other.load_state_dict(layer.state_dict())
    of_other = make_optimizer(other)
    of_other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    x = [tokens(layer)]
    train(layer, optimizer, x)
    train(other, of_other, x)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in layer.state_dict().items())


def test_an_optimizer_that_was_not_given_raises() -> None:
    layer = make()
    optimizer = torch.optim.AdamW(layer.parameters())
    prune_experts(layer, [0])
    layer(tokens(layer)).hidden_states.sum().backward()
    message = (
        "AdamW must be made after maxmoe.convert.surgery, or be given to it: it holds the replaced moe.router.weight,"
    )
    with pytest.raises(RuntimeError, match=message):
        optimizer.step()


def test_gradients_follow_the_experts() -> None:
    """Between backward and step, as if the removed experts had never existed."""
    layer = make()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    layer(tokens(layer)).hidden_states.square().mean().backward()
    before = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    kept = [expert for expert in range(layer.config.num_experts) if expert != 1]
    prune_experts(layer, [1], optimizer=optimizer)
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.equal(before[name][kept]), name
    with pytest.raises(
        ValueError, match=r"^moe.router.weight must have no gradient, because the gradient of merged or"
    ):
        duplicate_experts(layer, [0], optimizer=optimizer)
    optimizer.step()
    optimizer.zero_grad()
    duplicate_experts(layer, [0], optimizer=optimizer)


def test_what_is_frozen_stays_frozen() -> None:
    layer = make()
    layer.experts.requires_grad_(False)
    prune_experts(layer, [0])
    assert {name for name, parameter in layer.named_parameters() if parameter.requires_grad} == {"router.weight"}
