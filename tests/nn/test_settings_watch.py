"""A setting without an effect on the training warns once, with the name of the layer; a correct one does not."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import maxmoe
from maxmoe import MoEConfig, MoEFeedForward, StatsAccumulator
from maxmoe.nn.training_watch import PATIENCE

BALANCE_LOSS = {"load_balance_loss_weight": 0.01}
BIAS = {"score_correction_bias": True}
RATE = {**BIAS, "correction_bias_update_rate": 1e-3}


def model_with(**options: Any) -> nn.Sequential:
    config = MoEConfig(hidden_size=8, intermediate_size=4, num_experts=4, top_k=2, **options)
    return nn.Sequential(nn.Linear(8, 8), MoEFeedForward(config))


def messages_of(
    model: nn.Module,
    *,
    num_micro_batches: int = 1,
    after_step: Callable[[], object] = lambda: None,
    forward: Callable[[Tensor], Tensor] | None = None,
) -> list[str]:
    """Return the warnings of a training with one optimizer per parameter."""
    optimizers = [torch.optim.SGD([parameter], lr=1e-2) for parameter in model.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2 * PATIENCE):
            for _ in range(num_micro_batches):
                ((forward or model)(torch.randn(2, 6, 8)).square().mean() / num_micro_batches).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            after_step()
    return [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("options", "num_micro_batches", "message"),
    [
        (RATE, 1, "10 optimizer steps have not changed score_correction_bias, whose correction_bias_update_rate is"),
        (RATE, 3, "10 optimizer steps have not changed score_correction_bias, whose correction_bias_update_rate is"),
        (BIAS, 1, "score_correction_bias is zero after 10 optimizer steps, and nothing updates it: set"),
        (BALANCE_LOSS, 3, "3 backward passes of an optimizer step added the auxiliary loss with the factor 1: call"),
    ],
)
def test_what_is_forgotten_warns_once_by_name(options: dict[str, Any], num_micro_batches: int, message: str) -> None:
    (found,) = messages_of(model_with(**options), num_micro_batches=num_micro_batches)
    assert found.startswith(f"1: {message}")


def updated() -> list[str]:
    model = model_with(**RATE)
    return messages_of(model, num_micro_batches=2 * PATIENCE, after_step=StatsAccumulator(model).update)


def updated_by_quantiles() -> list[str]:
    model = model_with(**RATE, correction_bias_rule="quantile", score_function="sigmoid")
    return messages_of(model, after_step=StatsAccumulator(model).update)


def updated_by_hand() -> list[str]:
    model = model_with(**BIAS)
    bias: Any = model[1].router.score_correction_bias
    return messages_of(model, after_step=lambda: bias.add_(torch.randn(4)))


def loaded_and_static() -> list[str]:
    model = model_with(**BIAS)
    model[1].router.score_correction_bias.fill_(0.5)
    return messages_of(model)


def frozen_router() -> list[str]:
    model = model_with(**RATE, **BALANCE_LOSS)
    model[1].router.requires_grad_(False)
    return messages_of(model, num_micro_batches=2)


def evaluated() -> list[str]:
    """Backwards in eval mode, without a training of the layer."""
    return messages_of(model_with(**RATE, **BALANCE_LOSS).eval(), num_micro_batches=2)


def scaled() -> list[str]:
    model = model_with(**BALANCE_LOSS)
    maxmoe.set_aux_loss_scale(model, 1 / 2)
    return messages_of(model, num_micro_batches=2)


def without_accumulation() -> list[str]:
    model = model_with(**BALANCE_LOSS)
    return messages_of(model, forward=lambda x: model(model(checkpoint(model, x, use_reentrant=False))))


def without_a_loss() -> list[str]:
    return messages_of(model_with(), num_micro_batches=2)


@pytest.mark.parametrize(
    "train",
    [
        updated,
        updated_by_quantiles,
        updated_by_hand,
        loaded_and_static,
        frozen_router,
        evaluated,
        scaled,
        without_accumulation,
        without_a_loss,
    ],
)
def test_what_is_right_does_not(train: Callable[[], list[str]]) -> None:
    assert train() == []


def test_the_hook_is_gone_after_the_first_steps() -> None:
    model = model_with(**BIAS)
    model[1].router.score_correction_bias.fill_(0.5)
    assert model[1](torch.randn(2, 6, 8))._backward_hooks
    assert messages_of(model) == []
    assert not model[1](torch.randn(2, 6, 8))._backward_hooks
