"""Devices and networks of the time model, read from YAML files."""

import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml  # type: ignore[import-untyped]

from maxmoe.checks.fields import check_int, check_number, nearest, refuse_unknown_fields
from maxmoe.checks.yaml_file import load_yaml
from maxmoe.files import replacing

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
    """Speeds of one rank and of the network around it, from which the time of a step is predicted.

    A matrix product runs at the first share of the peak, the products of attention at the second:

        max_share * rows / (rows + half_rows)
        attention_share * channels / (channels + half_channels)

    Args:
        name: name of the device.
        sources: where the numbers are from.
        peak_flops: floating-point operations per second of a rank, by dtype, as "bfloat16".
        max_share: share of the peak that a product of many rows reaches.
        half_rows: number of rows at which a product reaches half of `max_share`.
        attention_share: share of the peak that causal attention of heads with many channels reaches, if half of the
            scores count.
        half_channels: number of channels of a head at which attention reaches half of `attention_share`.
        memory: bytes of a rank.
        memory_bandwidth: bytes per second that a rank reads and writes.
        ranks_per_node: number of ranks of a node; 0 if all ranks are on one node.
        intra_node: network within a node.
        inter_node: network between nodes.
        overlap: share of the communication that runs beside products, where the code starts it early. Collectives that
            take processors or bandwidth from the products beside them have less than 1.
        row_passes: passes over the rows of routed experts in a forward and a backward, beside saved tensors, as if
            memory were read at full speed: gathers, weights, sums over the experts of a token, sorting.
        cores: number of cores that the ranks of a node share, each rank with one thread; 0 if every rank has a device.
            With more ranks than cores, all speeds of a rank are divided by ranks / cores.
        block_overhead: seconds that a block takes in a forward and a backward beside products and memory traffic.
        sharded_block_overhead: seconds that a block takes on more than one rank in a forward, a backward and a step of
            the optimizer, beside products, memory traffic and collectives.
    """

    name: str
    sources: Sequence[str]
    peak_flops: Mapping[str, float]
    max_share: float
    half_rows: float
    attention_share: float
    half_channels: float
    memory: int
    memory_bandwidth: float
    ranks_per_node: int
    intra_node: Link
    inter_node: Link
    overlap: float
    row_passes: float = 0.0
    cores: int = 0
    block_overhead: float = 0.0
    sharded_block_overhead: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.sources, list | tuple) or not all(isinstance(line, str) for line in self.sources):
            raise ValueError(f"sources must be a list of texts, got {reprlib.repr(self.sources)}")
        if not isinstance(self.peak_flops, Mapping) or not all(isinstance(dtype, str) for dtype in self.peak_flops):
            raise ValueError(f"peak_flops must be values by dtype, got {reprlib.repr(self.peak_flops)}")
        for dtype, peak in self.peak_flops.items():
            check_number(f"peak_flops of {dtype}", peak, above=0.0)
        for name in ("max_share", "attention_share", "memory_bandwidth"):
            check_number(name, getattr(self, name), above=0.0)
        for name in ("half_rows", "half_channels", "overlap", "row_passes", "block_overhead", "sharded_block_overhead"):
            check_number(name, getattr(self, name), at_least=0.0)
        for name in ("max_share", "attention_share", "overlap"):
            if getattr(self, name) > 1:
                raise ValueError(f"{name} must be at most 1, got {getattr(self, name)}")
        if not isinstance(self.memory, int) or isinstance(self.memory, bool) or self.memory < 1:
            raise ValueError(f"memory must be a positive number of bytes, got {self.memory!r}")
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

    def save(self, path: Path) -> None:
        """Write the device to a file that `load` reads.

        Args:
            path: path of the file, which is replaced.
        """
        with replacing(path) as new:
            new.write_text(yaml.safe_dump(asdict(self), sort_keys=False, allow_unicode=True, width=120))

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

    def share(self, rows: int, channels: int | None) -> float:
        """Return the share of the peak of a product of so many rows, or of attention with so many channels per head."""
        if channels is None:
            return self.max_share / (1 + self.half_rows / max(rows, 1))
        return self.attention_share / (1 + self.half_channels / channels)

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
    values = dict(contents)
    for name in {"intra_node", "inter_node"} & values.keys():
        try:
            values[name] = Link(**values[name])
        except TypeError as error:
            raise ValueError(f"{name}: {error}, got {reprlib.repr(contents[name])}") from None
    if isinstance(values.get("memory"), float) and values["memory"].is_integer():
        values["memory"] = int(values["memory"])
    return Device(**values)
