"""Time of collectives by the network level that the ranks of an axis span."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from maxmoe.planning.many_meshes import as_tensor
from maxmoe.planning.time_model.device import Device
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.planned_collective import PlannedCollective

# Passes over the ring: an all-reduce is a reduce-scatter and an all-gather.
PASSES = {"all-reduce": 2}


class CollectiveCost(NamedTuple):
    """Cost of collectives on a rank; each tensor is ``(N,)``, one value for each mesh.

    Attributes:
        seconds: time.
        intra_bytes: bytes sent to ranks of the same node.
        inter_bytes: bytes sent to other nodes.
    """

    seconds: Tensor
    intra_bytes: Tensor
    inter_bytes: Tensor

    def __add__(self, other: "CollectiveCost") -> "CollectiveCost":  # type: ignore[override]
        """Return the sum of two costs."""
        return CollectiveCost(*(mine + its for mine, its in zip(self, other, strict=True)))

    def __mul__(self, times: "Tensor | float") -> "CollectiveCost":  # type: ignore[override]
        """Return the cost of several times as many collectives."""
        return CollectiveCost(*(each * times for each in self))

    def select(self, mask: Tensor) -> "CollectiveCost":
        """Return the costs in some of the meshes."""
        return CollectiveCost(*(each[mask] for each in self))


@dataclass(frozen=True)
class Topology:
    """Places of the ranks of many meshes on nodes: ranks are numbered with the last axis of the mesh fastest.

    Args:
        mesh: mesh, with all axes of the ranks.
        device: device and network.
        count: N, number of meshes.
    """

    mesh: Mesh
    device: Device
    count: int

    @cached_property
    def slowdown(self) -> Tensor:
        """By how much the ranks of a node slow each other down, ``(N,)``; see `Device.slowdown`."""
        ranks = as_tensor(self.mesh.num_ranks, self.count).tolist()
        return torch.tensor([self.device.slowdown(int(number)) for number in ranks], dtype=torch.float64)

    def group(self, axes: Sequence[str]) -> tuple[Tensor, Tensor]:
        """Return the number of ranks along axes, and the number of them on the node of a rank, both ``(N,)``."""
        ones = torch.ones(self.count, dtype=torch.float64)
        ranks, on_node, stride = ones, ones, ones
        for axis, size in reversed(self.mesh.sizes.items()):
            length = as_tensor(size, self.count)
            if axis in axes:
                ranks = ranks * length
                per_node = self.device.ranks_per_node
                on_node = on_node * ((per_node // stride).clamp(min=1).minimum(length) if per_node else length)
            stride = stride * length
        return ranks, on_node

    def sent(self, collectives: Iterable[PlannedCollective]) -> CollectiveCost:
        """Add up the cost of collectives. Those with the same bucket run as one.

        On a ring of n ranks on m nodes, with n / m ranks on each,

            seconds = steps_intra * latency_intra + steps_inter * latency_inter + max(intra, inter)

        with n - m steps within a node and m - 1 between nodes, twice that for an all-reduce, and each rank of a node
        with a network card of its own.
        """
        total: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        buckets = set()
        for item in collectives:
            times_and_bytes = total.setdefault((item.kind, item.axes), [0, 0])
            bucket = (item.kind, item.axes, item.purpose, item.bucket)
            if item.bucket is None or bucket not in buckets:
                times_and_bytes[0] += 1
                buckets.add(bucket)
            times_and_bytes[1] += item.bytes
        nothing = torch.zeros(self.count, dtype=torch.float64)
        result = CollectiveCost(nothing, nothing, nothing)
        for (kind, axes), (times, num_bytes) in total.items():
            result += self._sent(kind, axes, times, as_tensor(num_bytes, self.count))
        return result

    def _sent(self, kind: str, axes: tuple[str, ...], times: int, num_bytes: Tensor) -> CollectiveCost:
        ranks, on_node = self.group(axes)
        nodes = (ranks / on_node).ceil()
        if kind == "send":
            crossing = (nodes > 1).double()
        elif kind == "all-to-all":
            crossing = (ranks - on_node) / (ranks - 1).clamp(min=1)
        else:  # a ring leaves a node once, by the network cards of all its ranks on the node
            crossing = (nodes > 1).double() / on_node
        intra, inter = self.device.intra_node, self.device.inter_node
        within = num_bytes if kind not in ("all-to-all", "send") else num_bytes * (1 - crossing)
        steps = times * PASSES.get(kind, 1)
        latency = (ranks - nodes) * intra.latency + (nodes - 1) * inter.latency
        if kind == "send":
            latency = torch.where(nodes > 1, inter.latency, intra.latency)
        transfer = torch.maximum(within / intra.bandwidth, num_bytes * crossing / inter.bandwidth)
        seconds = (steps * latency + transfer) * self.slowdown
        return CollectiveCost(seconds, num_bytes * (1 - crossing), num_bytes * crossing)
