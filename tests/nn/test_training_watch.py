"""A setting without an effect on the training warns once, with the name of the layer; a correct one does not."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoE, MoEConfig, MoEFeedForward, StatsAccumulator
from maxmoe.nn.training_watch import PATIENCE

SIZES: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 4, "num_experts": 4, "top_k": 2}
BALANCE_LOSS = {"load_balance_loss_weight": 0.01}
BIAS = {"score_correction_bias": True}
RATE = {**BIAS, "correction_bias_update_rate": 1e-3}
Step = Callable[[Tensor], Tensor]


def warnings_of(run: Callable[[], object], times: int) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            run()
    return [str(warning.message) for warning in caught]


# An auxiliary loss that is no part of the training loss


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


def messages_of(step: Step, steps: int = 2 * PATIENCE) -> list[str]:
    """Return the warnings of some training steps."""
    return warnings_of(lambda: step(torch.randn(2, 3, 8)).backward(), steps)


@pytest.mark.parametrize("options", [BALANCE_LOSS, {"router_z_loss_weight": 0.01}], ids=str)
def test_a_forgotten_loss_warns_once_by_name(options: dict[str, float]) -> None:
    model = Model(**options)
    assert messages_of(lambda x: model(x)[0].sum(), PATIENCE) == []
    found = messages_of(lambda x: model(x)[0].sum())
    assert [message.partition(":")[0] for message in found] == ["layers.0", "layers.1"]
    gradients = f": {PATIENCE} backward passes gave the hidden states a gradient, but none the aux_loss: add it to"
    assert all(gradients in message for message in found)


def test_the_loss_of_one_layer_of_two() -> None:
    first, second = Model(**BALANCE_LOSS).layers

    def step(x: Tensor) -> Tensor:
        x, aux_loss, _ = first(x)
        return second(x).hidden_states.sum() + aux_loss

    (message,) = messages_of(step)
    assert message.startswith("MoE: ")  # no module calls it


def test_a_loss_that_was_added_once() -> None:
    model = Model(**BALANCE_LOSS)
    assert messages_of(lambda x: sum(model(x), torch.zeros(())).sum()) == []
    assert messages_of(lambda x: model(x)[0].sum()) == []


def not_added(model: Any) -> Step:
    return lambda x: model(x.requires_grad_())[0].sum()


def with_frozen_router_of_a_layer() -> Step:
    model = Model(1, **BALANCE_LOSS)
    model.layers[0].router.requires_grad_(False)
    return not_added(model)


def many_forwards_before_a_backward() -> Step:
    model = Model(1, **BALANCE_LOSS)
    return lambda x: torch.stack([sum(model(x), torch.zeros(())).sum() for _ in range(2 * PATIENCE)]).sum()


STEPS: dict[str, Callable[[], Step]] = {
    "no loss": lambda: not_added(Model()),
    "feed forward": lambda: not_added(MoEFeedForward(MoEConfig(**SIZES, **BALANCE_LOSS))),
    "frozen": lambda: not_added(Model(1, **BALANCE_LOSS).requires_grad_(False)),
    "frozen router": with_frozen_router_of_a_layer,
    "evaluated": lambda: not_added(Model(**BALANCE_LOSS).eval()),
    "many forwards": many_forwards_before_a_backward,
    "compiled": lambda: not_added(torch.compile(Model(1, **BALANCE_LOSS), backend="eager", fullgraph=True)),
}


@pytest.mark.parametrize("make", STEPS.values(), ids=STEPS)
def test_no_loss_is_forgotten(make: Callable[[], Step]) -> None:
    assert messages_of(make()) == []


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("is_added", [False, True])
def test_a_loss_under_activation_checkpointing(use_reentrant: bool, is_added: bool) -> None:
    model = Model(**BALANCE_LOSS)

    def step(x: Tensor) -> Tensor:
        x, aux_loss = checkpoint(model, x.requires_grad_(), use_reentrant=use_reentrant)
        return x.sum() + aux_loss if is_added else x.sum()

    # A reentrant checkpoint gives all its outputs a gradient, zero for those that are not used.
    assert len(messages_of(step)) == (0 if is_added or use_reentrant else 2)


# Settings


def model_with(**options: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), MoEFeedForward(MoEConfig(**SIZES, **options)))


def trained(
    model: nn.Module,
    num_micro_batches: int = 1,
    after_step: Callable[[], object] = lambda: None,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> list[str]:
    """Return the warnings of a training with one optimizer per parameter."""
    optimizers = [torch.optim.SGD([parameter], lr=1e-2) for parameter in model.parameters()]

    def step() -> None:
        for _ in range(num_micro_batches):
            ((forward or model)(torch.randn(2, 6, 8)).square().mean() / num_micro_batches).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        after_step()

    return warnings_of(step, 2 * PATIENCE)


NOT_UPDATED = "10 optimizer steps have not changed score_correction_bias, whose correction_bias_update_rate is"


@pytest.mark.parametrize(
    ("options", "num_micro_batches", "message"),
    [
        (RATE, 1, NOT_UPDATED),
        (RATE, 3, NOT_UPDATED),
        (BIAS, 1, "score_correction_bias is zero after 10 optimizer steps, and nothing updates it: set"),
        (BALANCE_LOSS, 3, "3 backward passes of an optimizer step added the auxiliary loss with the factor 1: call"),
    ],
)
def test_a_forgotten_setting_warns_once_by_name(options: Any, num_micro_batches: int, message: str) -> None:
    (found,) = trained(model_with(**options), num_micro_batches)
    assert found.startswith(f"1: {message}")


def updated(**options: Any) -> list[str]:
    model = model_with(**RATE, **options)
    return trained(model, 2 * PATIENCE, StatsAccumulator(model).update)


def updated_by_hand() -> list[str]:
    model = model_with(**BIAS)
    bias: Any = model[1].router.score_correction_bias
    return trained(model, after_step=lambda: bias.add_(torch.randn(4)))


def loaded_and_static() -> list[str]:
    model = model_with(**BIAS)
    model[1].router.score_correction_bias.fill_(0.5)
    return trained(model)


def with_frozen_router() -> list[str]:
    model = model_with(**RATE, **BALANCE_LOSS)
    model[1].router.requires_grad_(False)
    return trained(model, 2)


def scaled() -> list[str]:
    model = model_with(**BALANCE_LOSS)
    maxmoe.set_aux_loss_scale(model, 1 / 2)
    return trained(model, 2)


def without_accumulation() -> list[str]:
    model = model_with(**BALANCE_LOSS)
    return trained(model, forward=lambda x: model(model(checkpoint(model, x, use_reentrant=False))))


RIGHT: dict[str, Callable[[], list[str]]] = {
    "updated": updated,
    "updated by quantiles": lambda: updated(correction_bias_rule="quantile", score_function="sigmoid"),
    "updated by hand": updated_by_hand,
    "loaded and static": loaded_and_static,
    "frozen router": with_frozen_router,
    "evaluated": lambda: trained(model_with(**RATE, **BALANCE_LOSS).eval(), 2),
    "scaled": scaled,
    "without accumulation": without_accumulation,
    "without a loss": lambda: trained(model_with(), 2),
}


@pytest.mark.parametrize("train", RIGHT.values(), ids=RIGHT)
def test_no_setting_is_forgotten(train: Callable[[], list[str]]) -> None:
    assert train() == []
