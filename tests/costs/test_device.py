"""Device files: fields, errors, and derived numbers; the time of collectives on them."""

import re
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
import yaml

from maxmoe.costs import Device
from maxmoe.costs.device import device_names
from maxmoe.costs.measured import Work
from maxmoe.costs.step_time import computing, sending
from maxmoe.sharding import Mesh


@pytest.mark.parametrize("name", device_names())
def test_every_device_has_sources_and_survives_a_file(name: str, tmp_path: Path) -> None:
    device = Device.load(name)
    assert device.name == name and device.sources
    (tmp_path / "copy.yaml").write_text(yaml.safe_dump(asdict(device)))
    assert Device.load(tmp_path / "copy.yaml") == device


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"memori": 1}, "has no field 'memori'; the nearest are 'memory'"),
        ({"memory": -1}, "memory must be a positive number of bytes"),
        ({"max_share": 1.5}, "max_share must be at most 1, got 1.5"),
        ({"peak_flops": [1]}, "peak_flops must be values by dtype"),
        ({"peak_flops": {16: 1e15}}, "peak_flops must be values by dtype, got {16: "),
        ({"peak_flops": {"bfloat16": "fast"}}, "peak_flops of bfloat16 must be a finite float"),
        ({"intra_node": {"latency": 0}}, "intra_node: .*missing 1 required positional argument: 'bandwidth'"),
        ({"sources": "none"}, "sources must be a list of texts"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, object], message: str, tmp_path: Path) -> None:
    (path := tmp_path / "device.yaml").write_text(yaml.safe_dump(asdict(Device.load("h100")) | change))
    with pytest.raises(ValueError, match=message) as raised:
        Device.load(path)
    assert str(path) in str(raised.value)


@pytest.mark.parametrize("text", ["!!python/object/apply:os.getpid []", "[1, 2", "5", ""])
def test_a_file_that_is_no_device_is_refused(text: str, tmp_path: Path) -> None:
    (path := tmp_path / "device.yaml").write_text(text)
    with pytest.raises(ValueError, match=re.escape("device.yaml")):
        Device.load(path)


def test_the_peak_is_that_of_the_dtype() -> None:
    assert Device.load("h100").peak(torch.bfloat16) == 989e12
    with pytest.raises(ValueError, match="has no peak in float64"):
        Device.load("h100").peak(torch.float64)


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
