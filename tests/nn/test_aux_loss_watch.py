"""A layer whose auxiliary loss is not part of the training loss warns once, by its name."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from maxmoe import MoE, MoEConfig, MoEFeedForward
from maxmoe.nn.training_watch import PATIENCE

SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 4, "num_experts": 4, "top_k": 2}
LOSSES = [{"load_balance_loss_weight": 0.01}, {"router_z_loss_weight": 0.01}]
STEPS = 2 * PATIENCE


class Model(nn.Module):
    def __init__(self, num_layers: int = 2, **options: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MoE(MoEConfig(**SIZES, **options)) for _ in range(num_layers))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        aux_loss = x.new_zeros(())
        for layer in self.layers:
            output = layer(x)
            x, aux_loss = x + output.hidden_states, aux_loss + output.aux_loss
        return x, aux_loss


def messages_of(step: Callable[[Tensor], Tensor], steps: int = STEPS) -> list[str]:
    """Return the warnings of some training steps."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(steps):
            step(torch.randn(2, 3, 8)).backward()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize("options", LOSSES)
def test_a_forgotten_loss_warns_once_by_name(options: dict[str, float]) -> None:
    model = Model(**options)
    assert messages_of(lambda x: model(x)[0].sum(), PATIENCE) == []
    found = messages_of(lambda x: model(x)[0].sum())
    assert [message.partition(":")[0] for message in found] == ["layers.0", "layers.1"]
    gradients = f": {PATIENCE} backward passes gave the hidden states a gradient, but none the aux_loss: add it to"
    assert all(gradients in message for message in found)


def test_a_loss_that_is_added_does_not() -> None:
    model = Model(**LOSSES[0])
    assert messages_of(lambda x: sum(model(x), torch.zeros(())).sum()) == []
    assert messages_of(lambda x: model(x)[0].sum()) == []  # its auxiliary loss was added


def test_one_layer_of_two() -> None:
    model = Model(**LOSSES[0])

    def step(x: Tensor) -> Tensor:
        first, second = model.layers
        x, aux_loss, _ = first(x)
        return second(x).hidden_states.sum() + aux_loss  # type: ignore[no-any-return]

    (message,) = messages_of(step)
    assert message.startswith("MoE: ")  # no module calls it


def plain() -> Callable[[Tensor], Tensor]:
    model = Model()
    return lambda x: model(x)[0].sum()


def feed_forward() -> Callable[[Tensor], Tensor]:
    layer = MoEFeedForward(MoEConfig(**SIZES, **LOSSES[0]))
    return lambda x: layer(x).sum()


def frozen() -> Callable[[Tensor], Tensor]:
    model = Model(**LOSSES[0]).requires_grad_(False)
    return lambda x: model(x)[0].sum().requires_grad_()


def frozen_router() -> Callable[[Tensor], Tensor]:
    model = Model(**LOSSES[0])
    for layer in model.layers:
        layer.router.requires_grad_(False)
    return lambda x: model(x.requires_grad_())[0].sum()


def evaluated() -> Callable[[Tensor], Tensor]:
    """Gradients in eval mode, as for an attack or a saliency map."""
    model = Model(**LOSSES[0]).eval()
    return lambda x: model(x.requires_grad_())[0].sum()


def many_forwards_before_a_backward() -> Callable[[Tensor], Tensor]:
    model = Model(num_layers=1, **LOSSES[0])
    return lambda x: torch.stack([sum(model(x), torch.zeros(())).sum() for _ in range(STEPS)]).sum()


def compiled() -> Callable[[Tensor], Tensor]:
    model = Model(num_layers=1, **LOSSES[0])
    whole = torch.compile(model, backend="eager", fullgraph=True)
    return lambda x: whole(x)[0].sum()


@pytest.mark.parametrize(
    "make", [plain, feed_forward, frozen, frozen_router, evaluated, many_forwards_before_a_backward, compiled]
)
def test_no_warning(make: Callable[[], Callable[[Tensor], Tensor]]) -> None:
    step = make()
    assert messages_of(step) == []


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_added", [False, True])
def test_under_activation_checkpointing(use_reentrant: bool, is_added: bool) -> None:
    model = Model(**LOSSES[0])

    def step(x: Tensor) -> Tensor:
        x, aux_loss = checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)
        return x.sum() + aux_loss if is_added else x.sum()  # type: ignore[no-any-return]

    found = messages_of(step)
    # A reentrant checkpoint gives all its outputs a gradient, zero for those that are not used.
    assert len(found) == (0 if is_added or use_reentrant else 2)


def test_a_plain_layer_has_no_hooks() -> None:
    hidden_states, aux_loss, _ = MoE(MoEConfig(**SIZES))(torch.randn(2, 3, 8))
    assert not hidden_states._backward_hooks and not aux_loss._backward_hooks


def test_hooks_end_with_the_first_gradient() -> None:
    layer = MoE(MoEConfig(**SIZES, **LOSSES[0]))
    output = layer(torch.randn(2, 3, 8))
    assert output.aux_loss._backward_hooks
    (output.hidden_states.sum() + output.aux_loss).backward()
    assert not layer(torch.randn(2, 3, 8)).aux_loss._backward_hooks
    assert not copy.deepcopy(layer)(torch.randn(2, 3, 8)).aux_loss._backward_hooks
