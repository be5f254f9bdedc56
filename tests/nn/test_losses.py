"""The losses on the routing and the statistics, against numbers worked out by hand."""

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from maxmoe import MoE, MoEConfig, MoEStats
from maxmoe.config import ScoreFunction
from maxmoe.expert_load.step_counts import StepCounts
from maxmoe.nn import LocalTokens, load_balance_loss
from maxmoe.nn.step_balance import step_balance_loss
from support.moe_layers import LOSSES, Options, each_compute, make, padded, tokens
from support.threads import in_threads

each_score_function = pytest.mark.parametrize("score_function", get_args(ScoreFunction))
BALANCE: Options = {"load_balance_loss_weight": 0.3}


def one_hot_router(num_experts: int, scale: float = 1.0, **options: Any) -> MoE:
    """A layer with logits scale * x: the largest entry of a token selects its expert."""
    sizes: Options = {"hidden_size": num_experts, "num_experts": num_experts, "intermediate_size": 2}
    layer = MoE(MoEConfig(**{**sizes, "top_k": 1, "normalization": "none", **options}), dtype=torch.float64)
    with torch.no_grad():
        layer.router.weight.copy_(scale * torch.eye(num_experts))
    return layer


# Losses


@pytest.mark.parametrize("scope", ["sequence", "batch"])
def test_a_custom_balance_loss(scope: Any) -> None:
    """Its arguments, and the use of its result."""
    seen: list[Any] = []

    def loss(probabilities: Tensor, tokens_per_expert: Tensor, top_k: int, **options: Any) -> Tensor:
        seen.append((probabilities, tokens_per_expert, top_k, options["lengths"]))
        return 2 * load_balance_loss(probabilities, tokens_per_expert, top_k, **options)

    plain = make(load_balance_scope=scope, **BALANCE)
    own = MoE(plain.config, balance_loss=loss, dtype=torch.float64)
    own.load_state_dict(plain.state_dict())
    x, mask = tokens(plain, 3, 7), torch.arange(7) < torch.tensor([[7], [4], [2]])
    torch.testing.assert_close(own(x, mask).aux_loss, 2 * plain(x, mask).aux_loss)
    ((probabilities, counts, top_k, lengths),) = seen
    rows = 3 if scope == "sequence" else 1
    assert probabilities.shape == (rows, 21 // rows, 6) and counts.shape == (rows, 6) and top_k == 3
    assert lengths.tolist() == ([7, 4, 2] if rows == 3 else [13]) and int(counts.sum()) == 39


def test_no_loss_is_exactly_zero_and_takes_no_part_in_the_graph() -> None:
    layer = make()
    aux_loss = layer(tokens(layer)).aux_loss
    assert aux_loss.shape == () and aux_loss.item() == 0.0 and not aux_loss.requires_grad
    (layer(tokens(layer)).hidden_states.sum() + aux_loss).backward()


# Statistics


def stats_of(counts: list[int]) -> MoEStats:
    return MoEStats(torch.tensor(counts), torch.tensor(0), torch.tensor(0.0))


def test_load_and_dead_experts() -> None:
    stats = stats_of([6, 0, 2, 0])
    assert (stats.load_max_over_mean.item(), stats.dead_expert_fraction.item()) == (3.0, 0.5)
    balanced = stats_of([5, 5, 5, 5])
    assert (balanced.load_max_over_mean.item(), balanced.dead_expert_fraction.item()) == (1.0, 0.0)
    idle = stats_of([0, 0])
    assert (idle.load_max_over_mean.item(), idle.dead_expert_fraction.item()) == (0.0, 1.0)


@each_score_function
def test_entropy_from_none_to_that_of_all_experts(score_function: str) -> None:
    uniform = one_hot_router(4, score_function=score_function)(torch.zeros(3, 4, dtype=torch.float64))
    torch.testing.assert_close(uniform.stats.router_entropy.item(), math.log(4))
    x = torch.tensor([[0.0, -1e3, -1e3, -1e3]] * 3, dtype=torch.float64)
    certain = one_hot_router(4, score_function=score_function)(x)
    assert certain.stats.router_entropy == pytest.approx(0.0, abs=1e-12)


def test_entropy_is_the_mean_over_the_tokens() -> None:
    x = torch.tensor([[1.0, 1.0], [3.0, 1.0]], dtype=torch.float64).log()
    expected = (math.log(2) + math.log(4) - 0.75 * math.log(3)) / 2
    torch.testing.assert_close(one_hot_router(2)(x).stats.router_entropy.item(), expected)


@pytest.mark.parametrize("options", [{}, {"router_z_loss_weight": 0.2, **BALANCE}], ids=["", "losses"])
def test_statistics_take_no_part_in_the_graph(options: Options) -> None:
    layer = make(**options)
    stats = layer(tokens(layer).requires_grad_()).stats
    values: tuple[Tensor, ...] = (*stats, stats.load_max_over_mean, stats.dead_expert_fraction)
    assert not any(value.requires_grad for value in values)


# Counts of a step


def test_backwards_of_two_threads_are_all_counted() -> None:
    """An addition to many counts takes long enough to overlap with another one."""
    num_experts, num_backwards = 200_000, 80
    counts = StepCounts(num_experts, torch.device("cpu"))
    probabilities = torch.ones(1, num_experts, requires_grad=True)
    own, one, tokens = torch.ones(num_experts, dtype=torch.int64), torch.tensor(1), LocalTokens()

    def backwards() -> None:
        for _ in range(num_backwards):
            loss = step_balance_loss(probabilities, own, 1, one, counts, 1.0, tokens=tokens)
            torch.autograd.grad(loss, probabilities)

    in_threads(backwards, backwards)
    assert (counts.sums == 2 * num_backwards).all()


# Padding

MASK = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]]).bool()


@each_compute
def test_padding_passes_no_gradient_on(compute: Options) -> None:
    """Even if its upstream gradient is NaN."""
    layer = make(**LOSSES, **compute, expert_bias=True, num_shared_experts=2, shared_expert_gate=True)
    x = padded(layer, MASK).requires_grad_()
    output = layer(x, MASK)
    worst = torch.where(MASK.unsqueeze(-1), 1.0, float("nan")).double().expand_as(output.hidden_states)
    torch.autograd.backward((output.hidden_states, output.aux_loss), (worst, torch.ones_like(output.aux_loss)))
    assert x.grad is not None and torch.equal(x.grad[~MASK], torch.zeros_like(x.grad[~MASK]))
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
