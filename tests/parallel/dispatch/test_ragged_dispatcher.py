"""Bounded buffers: the rows that a rank computes at a time, and MaxText's numbers on four ranks.

Tolerance as in tests/reference/test_maxtext.py.
"""

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from maxmoe import MoE, MoEConfig
from maxmoe.config.moe_config import Overflow
from maxmoe.nn.local_dispatcher import LocalExperts
from maxmoe.nn.routing import TopK
from maxmoe.parallel import parallelize, parameter_shardings, token_sharding
from maxmoe.parallel.dispatch.expert_ranks import ExpertRanks
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import LogicalRules, Mesh
from support import golden_fixtures
from support.dispatched_layer import Batch, take_step
from support.parts import assert_part, assert_same
from support.run_ranks import run_cases, run_ranks

CONFIG = MoEConfig(hidden_size=6, intermediate_size=4, num_experts=8, top_k=2, buffer_factor=1.0)
# Experts over both axes, tokens over the first one only.
MIXED = LogicalRules.load("ep-tp").override(
    [("exp", ("data", "expert")), ("activation_exp", ("data", "expert")), ("activation_batch_moe", ())]
)
STRATEGIES = ("ring_of_experts", "ragged_all_to_all")


def uneven_layer(overflow: Overflow = "drop") -> MoE:
    """The first experts are preferred."""
    torch.manual_seed(0)
    layer = MoE(replace(CONFIG, overflow=overflow), dtype=torch.float64)
    layer.router.weight.data[:4] += 0.5
    return layer


@pytest.mark.parametrize("overflow", ["drop", "chunks"])
def test_no_rank_computes_more_rows_than_its_share_at_a_time(overflow: Overflow) -> None:
    x = torch.rand(1, 32, 6, dtype=torch.float64)
    routed = torch.bincount(uneven_layer().router(x[0]).experts.flatten(), minlength=8).view(4, 2).sum(1)
    bound = 32 * 2 // 4
    dropped = int((routed - bound).clamp_min(0).sum())
    num_windows = -(-int(routed.max()) // bound)
    assert dropped > 0 and num_windows > 1

    def check(sizes: dict[str, int], rules: LogicalRules, dispatch: Dispatch) -> None:
        mesh = Mesh(sizes)
        layer = parallelize(uneven_layer(overflow), mesh, rules, dispatch=dispatch)
        part = x.view(2, 16, 6)[mesh.coordinates()["data"]].unsqueeze(0) if "data" in sizes else x
        counts: list[int] = []
        layer.experts.register_forward_pre_hook(lambda _, arguments: counts.append(len(arguments[2].slots)))
        stats = layer(part).stats
        assert max(counts) <= bound
        if overflow == "drop":
            assert (stats.dropped, len(stats), len(counts)) == (dropped, 3, 1)
        else:
            assert (stats.dropped, stats.overflowed, len(counts)) == (0, 1, num_windows)
            assert stats.required_buffer_factor == pytest.approx(int(routed.max()) / bound, rel=1e-6)

    meshes = [({"expert": 4}, LogicalRules.load("ep-tp")), ({"data": 2, "expert": 2}, MIXED)]
    run_cases(check, 4, [(*mesh, dispatch) for mesh, dispatch in itertools.product(meshes, STRATEGIES)])


TOLERANCE = 2e-5


@pytest.mark.parametrize(("name", "dispatch"), golden_fixtures.DROPPING.items())
def test_a_bounded_buffer_drops_the_slots_that_maxtext_drops(name: str, dispatch: Any) -> None:
    """The output of a token without any kept slot is zero; the drops are counted on all ranks."""
    expected = golden_fixtures.layer(name)
    experts = golden_fixtures.load(name)[0]["topk_indices"].flatten()
    slots = torch.bincount(experts, minlength=expected.config.num_experts).view(4, -1).sum(1)
    dropped = int((slots - slots.sum() // 4).clamp_min(0).sum())
    assert dropped > 0 and expected.output.eq(0).all(-1).any()

    def check() -> None:
        mesh, rules = Mesh({"expert": 4}), LogicalRules.load("ep-as-dp")
        layer = MoE(expected.config)
        layer.load_state_dict(expected.parameters)
        shardings = parameter_shardings(layer, mesh, rules)
        parallelize(layer, mesh, rules, dispatch=dispatch)
        part = token_sharding(mesh, rules).slices(expected.x.shape[:2])
        got = take_step(layer, Batch(expected.x, expected.cotangent).part(part))
        assert got.stats.dropped == dropped and got.gradients.keys() >= expected.gradients.keys()
        for value, whole in ((got.hidden_states, expected.output), (got.gradients["x"], expected.gradients["x"])):
            assert_same(value, whole[part], scale=whole, tolerance=TOLERANCE)
        for key in expected.gradients.keys() - {"x"}:
            assert_part(got.gradients[key], expected.gradients[key], shardings[key].sharding, key, tolerance=TOLERANCE)

    run_ranks(check, 4)


def test_the_plan_of_a_group_with_some_experts_in_another_order() -> None:
    """Padding, and experts of ranks outside of the group, have no row."""
    no_group: Any = None  # the plan does not communicate
    ranks = ExpertRanks(no_group, LocalExperts(first=4, count=2, total=6, num_selectable=6), first_experts=(4, 0))
    experts = torch.tensor([[5, 0], [-1, -1], [2, 1], [0, 3]])
    plan = ranks.plan(TopK(torch.ones(4, 2), experts, is_unpadded=False))
    assert plan.group_sizes.tolist() == [0, 1, 2, 1]  # of the experts 4, 5, 0, 1
    assert plan.slots.tolist()[:4] == [0, 1, 6, 5]
    assert plan.rows.tolist() == [0, 1, -1, -1, -1, 3, 2, -1]
