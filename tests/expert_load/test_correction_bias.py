"""StatsAccumulator moves the biases of layers in training only, and ranks whose biases differ are noticed."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from maxmoe import MoEConfig, MoEFeedForward, StatsAccumulator
from maxmoe.parallel import parallelize
from maxmoe.ranks.checksum import are_equal, checksum
from maxmoe.sharding import Mesh
from support.run_ranks import run_cases

SIZES: dict[str, Any] = {"hidden_size": 6, "intermediate_size": 4, "num_experts": 8, "top_k": 2}
RULES: list[dict[str, Any]] = [
    {"correction_bias_rule": "sign", "correction_bias_update_rate": 0.25},
    {"correction_bias_rule": "quantile", "correction_bias_update_rate": 1.0},
]
each_rule = pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["correction_bias_rule"])


def model_of(rule: dict[str, Any]) -> nn.Sequential:
    torch.manual_seed(0)
    config = MoEConfig(**SIZES, score_function="sigmoid", score_correction_bias=True, **rule)
    return nn.Sequential(MoEFeedForward(config), MoEFeedForward(config))


def biases(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for name, buffer in model.named_buffers() if name.endswith("score_correction_bias")]


def step(model: nn.Module, accumulator: StatsAccumulator) -> None:
    model(torch.randn(2, 5, 6)).sum().backward()
    accumulator.update()


def evaluated(layer: MoEFeedForward) -> None:
    layer.eval()


def frozen(layer: MoEFeedForward) -> None:
    layer.requires_grad_(False)


def frozen_router(layer: MoEFeedForward) -> None:
    layer.router.requires_grad_(False)


@each_rule
@pytest.mark.parametrize("change", [evaluated, frozen, frozen_router])
def test_layers_that_are_not_in_training_keep_their_bias(
    rule: dict[str, Any], change: Callable[[MoEFeedForward], None]
) -> None:
    model = model_of(rule)
    change(model[1])  # type: ignore[arg-type]
    accumulator = StatsAccumulator(model)
    model(torch.randn(2, 5, 6)).sum().backward()
    stats = accumulator.update().layers["1"]
    first, second = biases(model)
    assert first.any() and not second.any()
    assert stats.tokens_per_expert.sum() == 20  # it has statistics nevertheless
    model.train().requires_grad_()
    step(model, accumulator)
    assert biases(model)[1].any()


@each_rule
def test_a_layer_without_tokens_keeps_its_bias(rule: dict[str, Any]) -> None:
    model = model_of(rule)
    accumulator = StatsAccumulator(model)
    step(model, accumulator)
    before = biases(model)
    accumulator.update()
    model[0](torch.randn(2, 5, 6), torch.zeros(2, 5, dtype=torch.bool)).sum().backward()
    accumulator.update()
    assert all(one.equal(other) for one, other in zip(biases(model), before, strict=True))


def alone(model: nn.Module) -> nn.Module:
    """One process per model, as under DDP, which copies the buffers of the first rank by default."""
    return model


def on_mesh(model: nn.Module) -> nn.Module:
    return parallelize(model, Mesh({"fsdp": 2}), "default")


def test_ranks_with_other_biases_are_noticed() -> None:
    """In the update after one that a rank has skipped."""

    def check(rule: dict[str, Any], wrap: Callable[[nn.Module], nn.Module]) -> None:
        model, rank = wrap(model_of(rule)), torch.distributed.get_rank()
        accumulator = StatsAccumulator(model)
        for number in range(2):
            model.train(number == 0 or rank == 0)
            step(model, accumulator)
        model.train()
        bias = rf"got \[.* on rank {rank} and another one elsewhere"
        with pytest.raises(ValueError, match=f"^the ranks must agree on the correction bias of '0', {bias}"):
            step(model, accumulator)

    run_cases(check, 2, [*zip(RULES, (alone, on_mesh), strict=True)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_checksum(dtype: torch.dtype) -> None:
    bias = torch.randn(64, dtype=dtype)
    mine = checksum(bias)

    def agree(*others: Tensor, copies: int = 1) -> bool:
        """Whether the checksums of ranks agree, `copies` of which have the bias."""
        checksums = torch.stack([checksum(other) for other in others] or [torch.zeros_like(mine)])
        return bool(are_equal(checksums.sum(0) + mine.expand(copies, *mine.shape).sum(0)))

    assert agree() and agree(bias.clone()) and agree(copies=4096)
    for expert in range(64):
        other = bias.clone()
        other[expert] = torch.nextafter(other[expert], torch.tensor(9.0, dtype=dtype))
        assert not agree(other) and not agree(other, copies=4095)
    assert not agree(bias.flip(0))
