"""The losses on the routing and the statistics, against numbers worked out by hand."""

import math
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from maxmoe import MoE, MoEConfig, MoEStats
from maxmoe.config import ScoreFunction
from maxmoe.nn import load_balance_loss
from maxmoe.ops import route
from support.moe_layers import LOSSES, Options, each_compute, make, padded, tokens

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


def test_losses_train_the_router_alone() -> None:
    layer = make(router_z_loss_weight=0.2, expert_bias=True, num_shared_experts=1, **BALANCE)
    x = tokens(layer).requires_grad_()
    parameters = dict(layer.named_parameters())
    gradients = torch.autograd.grad(layer(x).aux_loss, [x, *parameters.values()], allow_unused=True)
    reached = [name for name, gradient in zip(["x", *parameters], gradients, strict=True) if gradient is not None]
    assert reached == ["x", "router.weight"]


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


@each_score_function
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_normalized_scores_of_large_logits_have_finite_gradients(dtype: torch.dtype, score_function: Any) -> None:
    logits = torch.tensor([[-1000.0, -80.0, 0.0, 80.0, 1000.0], [-1000.0] * 5], dtype=dtype).requires_grad_()
    probabilities = route(logits, 1, score_function=score_function, normalization="none")[2]
    probabilities.square().sum().backward()
    assert probabilities.isfinite().all() and logits.grad is not None and logits.grad.isfinite().all()


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


def test_no_tokens() -> None:
    stats = make(**LOSSES)(torch.empty(2, 0, 7, dtype=torch.float64)).stats
    assert (stats.router_entropy.item(), stats.load_max_over_mean.item(), stats.dead_expert_fraction.item()) == (
        0,
        0,
        1,
    )


# Padding

MASK = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 0, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]]).bool()


def test_padding_counts_in_no_statistic() -> None:
    layer = make(**LOSSES)
    x = padded(layer, MASK)
    stats, alone = layer(x, MASK).stats, layer(x[MASK]).stats
    assert torch.equal(stats.tokens_per_expert, alone.tokens_per_expert)
    assert int(stats.tokens_per_expert.sum()) == int(MASK.sum()) * 3 and int(stats.dropped) == 0
    torch.testing.assert_close(stats.router_entropy, alone.router_entropy, rtol=1e-13, atol=0)


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
