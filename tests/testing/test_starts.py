"""Models that cannot be compared: random ones, and ranks that start with other parameters."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from testing.compared_models import Case, Model, build, compare, ddp


def test_a_random_model_is_told_apart() -> None:
    def with_noise() -> nn.Module:
        model: Any = build()
        model.last.register_forward_hook(lambda _, inputs, output: output + torch.rand_like(output))
        return model

    comparison = compare(Case(ddp, 2, build=with_noise))
    assert comparison.verdict == "random" and not comparison.gradients
    assert comparison.culprits[0].startswith("last.bias: the gradient differs by ")
    assert "the model is random: two runs in one process differ" in str(comparison)


def other_router(model: Any) -> nn.Module:
    if dist.get_rank() == 1:
        nn.init.normal_(model.router.weight)
    return model


def other_layers(model: Any) -> nn.Module:
    model.more = nn.Linear(2, 2)
    wide = nn.Linear(8, 16).double()
    wide.forward = lambda x: x @ wide.weight[:8].mT  # type: ignore[method-assign]
    model.last = wide
    return model


def without_last(model: Any) -> nn.Module:
    last = model.last
    del model.last
    object.__setattr__(model, "last", last)
    return model


def first_experts(model: Any) -> nn.Module:
    for name, parameter in list(model.experts.named_parameters()):
        setattr(model.experts, name, nn.Parameter(parameter.detach()[:4].clone()))
    model.experts.group = dist.group.WORLD
    return model


@pytest.mark.parametrize(
    ("parallelize", "culprits"),
    [
        (other_router, ["router.weight: rank 1 of 2 differ"]),
        (
            other_layers,
            [
                "more.weight: rank 0 has it, one process does not.",
                "last.weight: has shape (16, 8) on ranks 0, 1, which does not fit into (8, 8).",
            ],
        ),
        (without_last, ["last.weight: no rank has it.", "last.bias: no rank has it."]),
        (first_experts, ["experts.up: no rank has 256 of 512 entries."]),
    ],
)
def test_ranks_with_other_parameters(parallelize: Any, culprits: list[str]) -> None:
    comparison = compare(Case(parallelize, 2))
    assert comparison.verdict == "different start"
    assert "parameters differ before the first step" in str(comparison)
    for culprit in culprits:
        assert any(text.startswith(culprit) for text in comparison.culprits), comparison


def build_partly_unseeded() -> nn.Module:
    model: Any = build()
    nn.init.normal_(model.router.weight)
    torch.manual_seed(torch.initial_seed())
    return model


def build_dead() -> nn.Module:
    model = Model()
    for parameter in model.parameters():
        nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize("build", [build_partly_unseeded, build_dead])
def test_starts_that_can_be_compared(build: Any) -> None:
    """DDP sends the values of rank 0.

    Weights that were not loaded (NVIDIA-NeMo/Automodel#3701) get random values: two dead models would agree.
    """
    comparison = compare(Case(ddp, 2, build=build))
    assert comparison.equal and all(gradient.one_process > 0 for gradient in comparison.gradients)
