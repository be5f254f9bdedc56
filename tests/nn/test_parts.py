"""Shared, latent and zero-computation experts: numbers by hand, rows, and layers whose experts change."""

import pytest
import torch
from torch import Tensor

import maxmoe
from maxmoe import MoE, ZeroComputation
from maxmoe.convert.surgery import duplicate_experts, prune_experts
from maxmoe.nn import RoutingRecord
from maxmoe.ops import RaggedPlan
from support.moe_layers import LAYERS, assert_meets_specification, make, tokens


def replayed(layer: MoE, x: Tensor, experts: Tensor) -> maxmoe.MoEOutput:
    with maxmoe.replay_routing(layer, RoutingRecord({"": [experts]})):
        output: maxmoe.MoEOutput = layer(x)
    return output


def planned_rows(layer: MoE) -> list[RaggedPlan]:
    """Return a list that gets the plan of every call of the experts."""
    plans: list[RaggedPlan] = []
    layer.experts.register_forward_pre_hook(lambda _, arguments: plans.append(arguments[2]))
    return plans


# Shared and latent experts


@pytest.mark.parametrize(("name", "kept"), [("muse_spark", "experts.norm.weight"), ("inkling", "router.scale")])
def test_surgery_keeps_what_all_experts_share(name: str, kept: str) -> None:
    layer = make(**{**LAYERS[name], "num_experts": 18, "top_k": 2})
    x, parameter, shared = tokens(layer, 4), layer.get_parameter(kept), layer.router.weight[18:].clone()
    expected = layer(x)
    idle = (expected.stats.tokens_per_expert == 0).nonzero().flatten().tolist()
    prune_experts(layer, idle)
    torch.testing.assert_close(layer(x).hidden_states, expected.hidden_states)
    duplicate_experts(layer, [0])
    assert layer.get_parameter(kept) is parameter
    assert torch.equal(layer.router.weight[19 - len(idle) :], shared)
    assert_meets_specification(layer, x)


# Experts without a computation


def test_zero_copy_and_constant_by_hand() -> None:
    kinds = ZeroComputation(zero=1, copy=1, constant=1)
    layer = make(num_experts=2, top_k=1, normalization="none", zero_computation=kinds)
    vectors, mixing = layer.zero_computation_experts.vectors, layer.zero_computation_experts.mixing
    x = tokens(layer, 5)
    weights = torch.softmax(x @ layer.router.weight.mT, 1)
    zero, copy, constant = (replayed(layer, x, torch.full((5, 1), expert)).hidden_states for expert in (2, 3, 4))
    assert torch.equal(zero, torch.zeros_like(x))
    torch.testing.assert_close(copy, weights[:, 3:4] * x)
    share = 1 / (1 + torch.exp(x @ (mixing[0, 1] - mixing[0, 0])))
    expected = weights[:, 4:5] * (share[:, None] * x + (1 - share)[:, None] * vectors[0])
    torch.testing.assert_close(constant, expected)


@pytest.mark.parametrize("kinds", [{"zero": 2}, {"copy": 3}, {"constant": 2}], ids=str)
def test_rows_are_the_slots_of_experts_that_compute(path: str, kinds: dict[str, int]) -> None:
    layer = make(zero_computation=ZeroComputation(**kinds))
    plans = planned_rows(layer)
    stats = layer(tokens(layer, 4, 25)).stats
    used = plans[0].rows[plans[0].rows >= 0]
    assert len(used) == stats.tokens_per_expert[:6].sum() < stats.tokens_per_expert.sum() == 300
    assert plans[0].group_sizes.equal(stats.tokens_per_expert[:6])


def test_the_correction_bias_balances_all_experts() -> None:
    rule = {"score_correction_bias": True, "correction_bias_update_rate": 0.02}
    only_copies = torch.tensor([0.0] * 6 + [2.0] * 6)
    layer = make(zero_computation=ZeroComputation(copy=6), correction_bias=only_copies, **rule)
    x, shares = tokens(layer, 500), []
    for _ in range(200):
        counts = layer(x).stats.tokens_per_expert
        shares.append(float(counts[:6].sum() / counts.sum()))
        layer.update_correction_bias(counts)
    assert shares[0] < 0.1 and abs(shares[-1] - 0.5) < 0.05
