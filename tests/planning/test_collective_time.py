"""Bytes of collectives within and between nodes, against an enumeration of all ranks."""

import pytest

from maxmoe.planning import Device
from maxmoe.planning.step_time import sent
from maxmoe.sharding import Mesh
from maxmoe.sharding.planned_collective import PlannedCollective

PER_NODE = 8  # ranks per node of "h100"


@pytest.mark.parametrize("axes", [("expert",), ("fsdp",), ("fsdp", "expert")])
def test_an_all_to_all_sends_as_much_to_every_other_rank(axes: tuple[str, ...]) -> None:
    mesh = Mesh.planned({"fsdp": 4, "expert": 4})
    places = [mesh.coordinates(rank) for rank in range(mesh.num_ranks)]
    others = [rank for rank in range(1, 16) if all(places[rank][axis] == 0 for axis in mesh.axes if axis not in axes)]
    elsewhere = [rank for rank in others if rank >= PER_NODE]
    cost = sent([PlannedCollective("rows", "all-to-all", axes, 9000)], mesh, Device.load("h100"))
    assert cost.inter_bytes == pytest.approx(9000 * len(elsewhere) / len(others))
    assert cost.intra_bytes == pytest.approx(9000 - cost.inter_bytes)
