"""Device files: fields, errors, and derived numbers."""

import re
from pathlib import Path

import pytest
import torch
import yaml

from benchmarks import calibration
from maxmoe.planning import Device
from maxmoe.planning.device import device_names


@pytest.mark.parametrize("name", device_names())
def test_every_device_has_sources_and_survives_a_file(name: str, tmp_path: Path) -> None:
    device = Device.load(name)
    assert device.name == name and device.sources
    device.save(tmp_path / "copy.yaml")
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
    Device.load("h100").save(path := tmp_path / "device.yaml")
    path.write_text(yaml.safe_dump(yaml.safe_load(path.read_text()) | change))
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


def test_a_measurement_beside_other_load_is_refused() -> None:
    """If attention with more channels takes less time, its share of the peak cannot be computed."""
    with pytest.raises(RuntimeError, match=r"^larger heads of attention took no longer than smaller ones"):
        calibration._shares_of_attention({8: 2.0, 16: 1.5, 32: 1.0, 64: 0.5}, 1e9)
