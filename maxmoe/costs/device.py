"""Devices and networks, read from YAML files."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from maxmoe.checks.fields import check_int, check_number, nearest, refuse_unknown_fields
from maxmoe.checks.yaml_file import load_yaml

DEVICES = Path(__file__).parent / "devices"


@refuse_unknown_fields
@dataclass(frozen=True)
class Link:
    """Network of one level: within a node, or between nodes.

    Args:
        latency: seconds of one step of a collective, of a few bytes.
        bandwidth: bytes per second that a rank sends, while it receives at the same rate.
    """

    latency: float
    bandwidth: float

    def __post_init__(self) -> None:
        check_number("latency", self.latency, at_least=0.0)
        check_number("bandwidth", self.bandwidth, above=0.0)


@refuse_unknown_fields
@dataclass(frozen=True, kw_only=True)
class Device:
    """Speeds of one rank and of the network around it, by which `search` ranks plans.

    Args:
        name: name of the device.
        sources: where the numbers are from.
        peak_flops: floating-point operations per second of a rank, by dtype, as "bfloat16".
        max_share: share of the peak that large products reach.
        memory: bytes of a rank.
        memory_bandwidth: bytes per second that a rank reads and writes.
        ranks_per_node: number of ranks of a node; 0 if all ranks are on one node.
        intra_node: network within a node.
        inter_node: network between nodes.
        overlap: share of the collectives of weights that runs beside products. They take processors and bandwidth from
            the products, so that it is less than 1.
        cores: number of cores that the ranks of a node share, each rank with one thread; 0 if every rank has a device.
            With more ranks than cores, all speeds of a rank are divided by ranks / cores.
    """

    name: str
    sources: Sequence[str]
    peak_flops: Mapping[str, float]
    max_share: float
    memory: float
    memory_bandwidth: float
    ranks_per_node: int
    intra_node: Link
    inter_node: Link
    overlap: float
    cores: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.sources, list | tuple) or not all(isinstance(line, str) for line in self.sources):
            raise ValueError(f"sources must be a list of texts, got {reprlib.repr(self.sources)}")
        if not isinstance(self.peak_flops, Mapping):
            raise ValueError(f"peak_flops must be values by dtype, got {reprlib.repr(self.peak_flops)}")
        peaks = {f"peak_flops of {dtype}": peak for dtype, peak in self.peak_flops.items()}
        speeds = {name: getattr(self, name) for name in ("max_share", "memory", "memory_bandwidth")}
        for name, value in (speeds | peaks).items():
            check_number(name, value, above=0.0)
        check_number("overlap", self.overlap, at_least=0.0)
        for name in ("max_share", "overlap"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be at most 1, got {getattr(self, name)}")
        for name in ("ranks_per_node", "cores"):
            check_int(name, getattr(self, name), at_least=0)

    @classmethod
    def load(cls, source: "str | Path | Device") -> "Device":
        """Load a device by its name, or from a file.

        Args:
            source: name of a device of this library; path of a file: a `Path`, or a string that ends in .yaml or .yml.
                A device is returned unchanged.

        Returns:
            The device.

        Raises:
            ValueError: for an unknown name, with the nearest names, and for a file of another form.
        """
        if isinstance(source, Device):
            return source
        if isinstance(source, Path) or source.endswith((".yaml", ".yml")):
            return load_yaml(Path(source), _device)
        names = device_names()
        if source not in names:
            raise ValueError(f"there is no device {source!r}{nearest(source, names)}; a path ends in .yaml or .yml")
        return load_yaml(DEVICES / f"{source}.yaml", _device)

    def peak(self, dtype: torch.dtype) -> float:
        """Return the peak of one rank in a dtype, in floating-point operations per second.

        Raises:
            ValueError: if the device has no peak in the dtype.
        """
        name = str(dtype).removeprefix("torch.")
        if name not in self.peak_flops:
            known = ", ".join(self.peak_flops) or "none"
            raise ValueError(f"the device {self.name!r} has no peak in {name}, only in {known}: add it to peak_flops")
        return self.peak_flops[name]

    def slowdown(self, num_ranks: int) -> float:
        """Return the factor on every time if the ranks of a node share its cores, at least 1."""
        on_node = min(num_ranks, self.ranks_per_node or num_ranks)
        return max(1.0, on_node / self.cores) if self.cores else 1.0


def device_names() -> list[str]:
    """Return the names of the devices that `Device.load` knows."""
    return sorted(path.stem for path in DEVICES.glob("*.yaml"))


def _device(contents: Any) -> Device:
    """Make a device of the contents of a file."""
    if not isinstance(contents, dict):
        raise ValueError(f"a device must be values by name, got {reprlib.repr(contents)}")
    links = {}
    for name in {"intra_node", "inter_node"} & contents.keys():
        try:
            links[name] = Link(**contents[name])
        except TypeError as error:
            raise ValueError(f"{name}: {error}, got {reprlib.repr(contents[name])}") from None
    return Device(**contents | links)
