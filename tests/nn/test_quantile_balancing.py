"""Quantile balancing: the biases of the specification, up to the width of a bin, balance the load."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from maxmoe import MoEConfig, MoEFeedForward, StatsAccumulator, reference
from maxmoe.nn.router import NUM_BINS, balanced_bias, required_bias_histogram  # type: ignore[attr-defined]
from maxmoe.parallel import parallelize
from maxmoe.reference.routing import scores
from maxmoe.sharding import LogicalRules, Mesh
from support.parallel_decoder import token_spec
from support.parts import part_by_definition
from support.run_ranks import run_ranks

SIZES: dict[str, Any] = {"hidden_size": 6, "intermediate_size": 4, "num_experts": 8, "top_k": 2}
QUANTILE: dict[str, Any] = {
    "score_function": "sigmoid",
    "score_correction_bias": True,
    "correction_bias_rule": "quantile",
    "correction_bias_update_rate": 1.0,
}


def layer_of(**options: Any) -> MoEFeedForward:
    """A layer that prefers its last experts."""
    torch.manual_seed(0)
    layer = MoEFeedForward(MoEConfig(**{**SIZES, **QUANTILE, "router_bias": True, **options}), dtype=torch.float64)
    with torch.no_grad():
        layer.router.bias.copy_(torch.linspace(-1, 1, 8))  # type: ignore[union-attr]
        bias_of(layer).copy_(torch.linspace(-0.1, 0.3, 8))
    return layer


def bias_of(layer: MoEFeedForward) -> Tensor:
    bias = layer.router.score_correction_bias
    assert bias is not None
    return bias


def scores_of(layer: MoEFeedForward, x: Tensor) -> Tensor:
    logits = x.flatten(0, -2) @ layer.router.weight.T + layer.router.bias
    return scores(logits.detach(), layer.config.score_function)


def bin_width(bias: Tensor) -> float:
    return float(bias.max() - bias.min() + 2) / NUM_BINS


@pytest.mark.parametrize("top_k", [1, 3, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_balanced_bias_is_that_of_the_specification(top_k: int, dtype: torch.dtype) -> None:
    scores, bias = torch.rand(400, 8, dtype=dtype) ** 3, torch.randn(8, dtype=dtype)
    balanced = balanced_bias(required_bias_histogram(scores, bias, top_k), bias, top_k)
    expected = reference.balanced_bias(scores, bias, top_k)
    assert balanced.dtype == dtype and float(balanced.mean()) == pytest.approx(0, abs=1e-6)
    torch.testing.assert_close(balanced, expected, rtol=0, atol=2 * bin_width(bias))
    assert (balanced - bias).abs().max() > 20 * bin_width(bias)


@pytest.mark.parametrize(("infinite", "top_k"), [({0: -torch.inf, 5: -torch.inf}, 3), ({2: torch.inf}, 2)], ids=str)
def test_experts_that_all_tokens_or_none_select_are_left_out(infinite: dict[int, float], top_k: int) -> None:
    """The other experts get the biases of a layer without these experts, for the remaining slots."""
    scores, bias = torch.rand(400, 8, dtype=torch.float64) ** 3, torch.randn(8, dtype=torch.float64)
    for expert, value in infinite.items():
        bias[expert] = value
    rest = [expert for expert in range(8) if expert not in infinite]
    left = top_k - sum(value > 0 for value in infinite.values())
    balanced = balanced_bias(required_bias_histogram(scores, bias, top_k), bias, top_k)
    expected = reference.balanced_bias(scores[:, rest], bias[rest], left)
    torch.testing.assert_close(balanced[rest], expected, rtol=0, atol=2 * bin_width(bias[rest]))
    assert all(balanced[expert] == value for expert, value in infinite.items())


@pytest.mark.parametrize("score_function", ["sigmoid", "softmax"])
@pytest.mark.parametrize("value", [-0.1, -torch.inf, torch.inf])
def test_it_balances_the_load(score_function: Any, value: float) -> None:
    """An infinite bias survives, and the others are balanced."""
    layer, x = layer_of(score_function=score_function), torch.randn(4, 500, 6, dtype=torch.float64)
    bias_of(layer)[3] = value
    accumulator, loads = StatsAccumulator(layer), []
    for _ in range(20):
        layer(x).sum().backward()
        loads.append(accumulator.update().layers["moe"].tokens_per_expert.double())
    if not math.isfinite(value):
        assert bias_of(layer)[3] == value and loads[-1][3] == (2000 if value > 0 else 0)
        loads = [load[torch.arange(8) != 3] for load in loads]
    assert loads[0].max() > 1.5 * loads[0].mean() and loads[-1].max() < 1.1 * loads[-1].mean(), loads


@pytest.mark.parametrize("rate", [0.25, 1.0])
@pytest.mark.parametrize("score_function", ["sigmoid", "softmax"])
def test_a_step_over_micro_batches(rate: float, score_function: Any) -> None:
    """Without padding, and without forwards whose backward is never called."""
    layer = layer_of(correction_bias_update_rate=rate, score_function=score_function)
    batches, mask = torch.randn(3, 2, 50, 6, dtype=torch.float64), torch.arange(50) < torch.tensor([[50], [20]])
    before, accumulator = bias_of(layer).clone(), StatsAccumulator(layer)
    for x in batches:
        layer(x, mask).sum().backward()
    with torch.no_grad():
        layer(10 * batches[0])
    layer(10 * batches[0])
    accumulator.update()
    expected = reference.balanced_bias(scores_of(layer, batches[:, mask]), before, 2)
    torch.testing.assert_close(bias_of(layer) - before, rate * (expected - before), rtol=0, atol=2 * bin_width(before))
    after = bias_of(layer).clone()
    accumulator.update()  # a step without tokens
    assert bias_of(layer).equal(after) and not after.equal(before)


def test_counts_alone_are_not_enough() -> None:
    layer = layer_of()
    with pytest.raises(ValueError, match=r"^update_correction_bias needs correction_bias_rule='sign', got 'quantile'"):
        layer.update_correction_bias(torch.ones(8, dtype=torch.int64))


@pytest.mark.filterwarnings("ignore:no rule for the logical name")
def test_ranks_find_the_bias_of_one_process() -> None:
    x = torch.randn(4, 6, 6, dtype=torch.float64)

    def train(model: Any, part: Tensor) -> None:
        accumulator = StatsAccumulator(model)
        for micro_batch in (part, 0.5 * part):
            model(micro_batch).sum().backward()
        accumulator.update()

    whole = layer_of()
    train(whole, x)

    def ddp() -> Tensor:
        layer = layer_of()
        train(DistributedDataParallel(layer), x.split(2)[torch.distributed.get_rank()])
        return bias_of(layer)

    def mesh(sizes: dict[str, int]) -> Tensor:
        rules, on = LogicalRules.load("shard-exp-on-fsdp"), Mesh(sizes)
        layer = parallelize(layer_of(), on, rules)
        train(layer, part_by_definition(x, token_spec(on, rules), on))
        return bias_of(layer)

    def biases() -> list[Tensor]:
        return [ddp(), mesh({"fsdp": 2}), mesh({"expert": 2})]

    for bias in itertools.chain(*run_ranks(biases, 2)):
        torch.testing.assert_close(bias, bias_of(whole), rtol=0, atol=1e-12)
