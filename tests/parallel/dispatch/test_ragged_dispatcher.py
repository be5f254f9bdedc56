"""Rows that are sent: bounds on their number, as in MaxText's tables; copies of a layer."""

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch

from maxmoe import MoE, MoEConfig, parallelize
from maxmoe.config.moe_config import Overflow
from maxmoe.nn.windows import Window
from maxmoe.parallel.dispatch.ragged_dispatcher import splits_of
from maxmoe.parallel.plan.dispatch_plan import Dispatch
from maxmoe.sharding import LogicalRules, Mesh
from support import golden_fixtures
from support.run_ranks import run_cases

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


def test_a_layer_can_be_copied() -> None:
    def check(dispatch: Dispatch) -> None:
        layer: Any = parallelize(uneven_layer(), Mesh({"expert": 2}), "ep-as-dp", dispatch=dispatch)
        x = torch.randn(1, 8, 6, dtype=torch.float64)
        assert copy.deepcopy(layer)(x).hidden_states.equal(layer(x).hidden_states)

    run_cases(check, 2, [(dispatch,) for dispatch in STRATEGIES])


def offsets(sizes: list[int]) -> list[int]:
    return [sum(sizes[:index]) for index in range(len(sizes))]


@pytest.mark.parametrize(("kind", "bounded"), [("plain", False), ("trunc", True)])
def test_splits_and_offsets_are_maxtexts(kind: str, bounded: bool) -> None:
    """Row s of each table is computed by rank s; `output_offsets` are offsets in the receivers' buffers."""
    arrays, meta = golden_fixtures.load("a2a_params")
    window = Window(0, meta["buffer"]) if bounded else None
    splits = [splits_of(arrays["matrix"], rank, window) for rank in range(meta["ep"])]
    routed, send, receive = ([list(split[field]) for split in splits] for field in range(3))
    of_routed, of_receive = (torch.tensor([offsets(sizes) for sizes in lists]) for lists in (routed, receive))
    tables = {
        "dispatch_input_offsets": of_routed,
        "dispatch_send_sizes": torch.tensor(send),
        "dispatch_output_offsets": of_receive.t(),
        "dispatch_recv_sizes": torch.tensor(receive),
        "combine_input_offsets": of_receive,
        "combine_send_sizes": torch.tensor(receive),
        "combine_output_offsets": of_routed.t(),
        "combine_recv_sizes": torch.tensor(send),
    }
    wrong = [name for name, table in tables.items() if not table.equal(arrays[f"{kind}_{name}"])]
    assert not wrong
    if bounded:
        assert torch.tensor(send).equal(arrays["truncated_matrix"])
        assert torch.tensor(receive).sum(1).max() == meta["buffer"]
