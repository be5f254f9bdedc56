"""Rows that are sent: bounds on their number; copies of a layer."""

import copy
from typing import Any

import pytest
import torch

from maxmoe import MoE, MoEConfig, parallelize
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import LogicalRules, Mesh
from support.run_ranks import run_ranks

CONFIG = MoEConfig(hidden_size=6, intermediate_size=4, num_experts=8, top_k=2, buffer_factor=1.0)
# Experts over both axes, tokens over the first one only.
MIXED = LogicalRules.load("ep-tp").override(
    [("exp", ("data", "expert")), ("activation_exp", ("data", "expert")), ("activation_batch_moe", ())]
)


def uneven_layer() -> MoE:
    """The first experts are preferred."""
    torch.manual_seed(0)
    layer = MoE(CONFIG, dtype=torch.float64)
    layer.router.weight.data[:4] += 0.5
    return layer


@pytest.mark.parametrize("dispatch", ["ring_of_experts", "ragged_all_to_all"])
@pytest.mark.parametrize(
    ("sizes", "rules"),
    [({"expert": 4}, LogicalRules.load("ep-tp")), ({"data": 2, "expert": 2}, MIXED)],
    ids=["all", "mixed"],
)
def test_no_rank_computes_more_rows_than_its_share(
    sizes: dict[str, int], rules: LogicalRules, dispatch: Dispatch
) -> None:
    x = torch.rand(1, 32, 6, dtype=torch.float64)
    routed = torch.bincount(uneven_layer().router(x[0]).experts.flatten(), minlength=8).view(4, 2).sum(1)
    bound = 32 * 2 // 4
    dropped = int((routed - bound).clamp_min(0).sum())
    assert dropped > 0

    def rows() -> tuple[int, int]:
        mesh = Mesh(sizes)
        layer = parallelize(uneven_layer(), mesh, rules, dispatch=dispatch)
        part = x.view(2, 16, 6)[mesh.coordinates()["data"]].unsqueeze(0) if "data" in sizes else x
        counts: list[int] = []
        layer.experts.register_forward_pre_hook(lambda _, arguments: counts.append(len(arguments[2].slots)))
        dropped = int(layer(part).stats.dropped)
        return dropped, counts[0]

    for found, count in run_ranks(rows, 4):
        assert count <= bound and found == dropped


@pytest.mark.parametrize("dispatch", ["ring_of_experts", "ragged_all_to_all"])
def test_a_layer_can_be_copied(dispatch: Dispatch) -> None:
    def check() -> bool:
        layer: Any = parallelize(uneven_layer(), Mesh({"expert": 2}), "ep-as-dp", dispatch=dispatch)
        x = torch.randn(1, 8, 6, dtype=torch.float64)
        return bool(copy.deepcopy(layer)(x).hidden_states.equal(layer(x).hidden_states))

    assert run_ranks(check, 2) == [True, True]
