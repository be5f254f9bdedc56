"""The planned exchanges of Muon, against the collectives of real ranks."""

from math import prod
from statistics import mean

import pytest
import torch

from dispatching.sent_bytes import SentBytes
from maxmoe.models import Decoder
from maxmoe.optim import Muon, parameter_groups
from maxmoe.optim.muon_communication import muon_communication
from maxmoe.parallel import parallelize
from maxmoe.parallel.plan.planner import make_plan
from maxmoe.planning import estimate
from maxmoe.sharding import LogicalRules, Mesh
from support.parallel_decoder import CONFIG, MeshRules, decoder, layouts
from support.run_ranks import run_ranks


def planned(layout: MeshRules) -> tuple[int, int]:
    """Number and bytes of the collectives of a rank in a step."""
    model, rules = decoder(), LogicalRules.load(layout.rules)
    plan = make_plan(model, Mesh.planned(layout.sizes), rules)
    choices = parameter_groups(model).choices
    communication = [*muon_communication(plan.mesh, plan.parameters, choices, torch.float64)]
    return len(communication), sum(item.bytes for item in communication)


@pytest.mark.sampled(0)
@pytest.mark.parametrize("world_size", [4])
def test_real_ranks_send_what_is_planned(world_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every preset, with replicas and strided shards among them, in several buckets."""
    for module in ("optim.distributed_newton_schulz", "optim.muon_communication"):
        monkeypatch.setattr(f"maxmoe.{module}.BUCKET_SIZE", 200)

    def measured() -> list[tuple[int, int]]:
        found = []
        for layout in layouts(world_size):
            model = parallelize(decoder(), Mesh(layout.sizes), layout.rules)
            optimizer = Muon(parameter_groups(model), ns_dtype=torch.float64)
            with SentBytes() as counted:
                optimizer.step()
            assert counted.counts.keys() <= {"all-to-all"}
            found.append((counted.times.total(), counted.counts.total()))
        return found

    of_ranks = run_ranks(measured, world_size)
    for layout, *found in zip(layouts(world_size), *of_ranks, strict=True):
        times, num_bytes = planned(layout)
        assert {count for count, _ in found} == {times}, layout
        # Rounded down for each collective.
        assert 0 <= mean(sent for _, sent in found) - num_bytes < max(times, 1), layout
    assert max(times for times, _ in of_ranks[0]) > 2


def muon_traffic(rules: str, sizes: dict[str, int]) -> dict[str, tuple[int, int]]:
    model = Decoder(CONFIG, device="meta", dtype=torch.float32)
    step = {"batch_size": prod(sizes.values()), "sequence_length": 8, "allow_unused": True}
    traffic = {}
    for optimizer in ("adamw", "muon"):
        rows = estimate(model, Mesh.planned(sizes), rules, optimizer=optimizer, **step).traffic  # type: ignore[arg-type]
        traffic[optimizer] = {(row.purpose, row.kind, row.axis): (row.times, row.bytes) for row in rows}
    assert traffic["adamw"].items() <= traffic["muon"].items()
    more = traffic["muon"].keys() - traffic["adamw"].keys()
    assert {kind for _, kind, _ in more} <= {"all-to-all"}
    return {f"{purpose}, {axis}": traffic["muon"][purpose, kind, axis] for purpose, kind, axis in more}


def test_estimate_counts_them_with_muon_alone() -> None:
    """In bfloat16 on meta: each of two ranks sends half of half of all matrices, and the same number of results."""
    model = Decoder(CONFIG, device="meta")
    choices = [choice for choice in parameter_groups(model).choices if choice.matrix is not None]
    matrices = sum(prod(choice.shape) for choice in choices)
    half = 1, 2 * matrices // 4
    assert muon_traffic("pure-fsdp", {"fsdp": 2}) == {
        "Muon, gather of matrices, fsdp": half,
        "Muon, scatter of results, fsdp": half,
    }
    experts = sum(prod(choice.shape) for choice in choices if len(choice.shape) == 3)
    rest = 1, 2 * (matrices - experts) // 4
    assert set(muon_traffic("shard-exp-on-fsdp", {"fsdp": 2}).values()) == {rest}
    assert muon_traffic("ep-as-dp", {"expert": 2}) == {}
