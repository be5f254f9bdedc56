"""Devices, and the time that operators and collectives take on them."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from maxmoe.costs import Device
from maxmoe.costs.device import device_names
from maxmoe.costs.measured import Work
from maxmoe.costs.step_time import computing, sending
from maxmoe.sharding import Mesh


def test_every_device_has_sources_and_survives_a_file(tmp_path: Path) -> None:
    for name in device_names():
        device = Device.load(name)
        assert device.name == name and device.sources
        (tmp_path / "copy.yaml").write_text(yaml.safe_dump(asdict(device)))
        assert Device.load(tmp_path / "copy.yaml") == device


H100 = asdict(Device.load("h100"))


@pytest.mark.parametrize(
    ("contents", "message"),
    [
        (H100 | {"memori": 1}, "has no field 'memori'; the nearest are 'memory'"),
        (H100 | {"memory": -1}, "memory must be a finite float > 0.0, got -1"),
        (H100 | {"max_share": 1.5}, "max_share must be at most 1, got 1.5"),
        (H100 | {"peak_flops": [1]}, "peak_flops must be values by dtype"),
        (H100 | {"peak_flops": {"bfloat16": "fast"}}, "peak_flops of bfloat16 must be a finite float"),
        (H100 | {"intra_node": {"latency": 0}}, "intra_node: .*missing 1 required positional argument: 'bandwidth'"),
        (H100 | {"sources": "none"}, "sources must be a list of texts"),
        ([1, 2], r"a device must be values by name, got \[1, 2\]"),
    ],
)
def test_what_is_wrong_in_a_file_is_named(contents: object, message: str, tmp_path: Path) -> None:
    (path := tmp_path / "device.yaml").write_text(yaml.safe_dump(contents))
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}: .*{message}"):
        Device.load(path)


def test_ranks_share_the_cores_of_a_node() -> None:
    assert [Device.load("cpu").slowdown(number) for number in (1, 2, 4, 8)] == [1.0, 1.0, 2.0, 4.0]
    assert Device.load("h100").slowdown(2048) == 1.0


@pytest.mark.parametrize(
    ("kind", "axes", "num_ranks", "num_nodes", "within", "crossing"),
    [
        ("all-gather", ["expert"], 8, 1, 1.0, 0.0),  # the last axis is within a node
        ("all-gather", ["fsdp"], 4, 4, 1.0, 1.0),  # one rank of each node
        ("all-gather", ["fsdp", "expert"], 32, 4, 1.0, 1 / 8),  # a ring leaves a node by the cards of eight ranks
        ("all-to-all", ["fsdp", "expert"], 32, 4, 7 / 31, 24 / 31),  # to 24 of 31 other ranks
    ],
)
def test_the_slower_network_decides(
    kind: str, axes: list[str], num_ranks: int, num_nodes: int, within: float, crossing: float
) -> None:
    device, mesh, count = Device.load("h100"), Mesh.planned({"fsdp": 4, "expert": 8}), 10**9
    latency = (num_ranks - num_nodes) * 1.9e-6 + (num_nodes - 1) * 4e-6
    bandwidth = max(within * count / 360e9, crossing * count / 45e9)
    assert sending(kind, axes, 3, count, mesh, device) == pytest.approx(3 * latency + bandwidth)


def test_an_operator_is_as_slow_as_products_or_as_memory() -> None:
    device, mesh = Device.load("h100"), Mesh.planned({})
    product, copy = Work(989 * 10**12, 10), Work(0, 335 * 10**10)
    assert computing({product: 2, copy: 3}, 989e12, mesh, device) == pytest.approx(2 / device.max_share + 3)
