"""Seconds of a step on a device, from what it computes and sends: a ranking of plans, with the errors in docs/costs.md.

The roofline of each operator, and rings for collectives: no imbalance of experts, and no time between operators.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from maxmoe.costs.device import Device
from maxmoe.costs.measured import GATHER, REDUCTION, Work
from maxmoe.costs.report import RankEstimate, Traffic
from maxmoe.sharding.mesh import Mesh

WEIGHTS = (GATHER, REDUCTION)  # purposes of the collectives that run beside products


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step of one rank.

    Args:
        compute: operators, and the update by the optimizer.
        exposed: collectives, without what runs beside operators.
        bubble: waiting for other stages.
    """

    compute: float
    exposed: float
    bubble: float = 0.0

    @property
    def seconds(self) -> float:
        """Time that passes."""
        return self.compute + self.exposed + self.bubble


def ranks_along(axes: Sequence[str], mesh: Mesh, device: Device) -> tuple[int, int]:
    """Return the number of ranks along axes, and how many of them are on one node; the last axis is within nodes."""
    ranks = on_node = stride = 1
    for axis, size in reversed(mesh.sizes.items()):
        if axis in axes:
            ranks *= size
            on_node *= min(max(device.ranks_per_node // stride, 1), size) if device.ranks_per_node else size
        stride *= size
    return ranks, on_node


def sending(kind: str, axes: Sequence[str], times: float, num_bytes: float, mesh: Mesh, device: Device) -> float:
    """Return the seconds of collectives over axes, in which a rank sends `num_bytes` in total.

    On a ring of n ranks on m nodes, with n / m ranks on each,

        seconds = steps_intra * latency_intra + steps_inter * latency_inter + max(intra, inter)

    with n - m steps within a node and m - 1 between nodes, twice that for an all-reduce, and each rank of a node with a
    network card of its own.
    """
    intra, inter = device.intra_node, device.inter_node
    ranks, on_node = ranks_along(axes, mesh, device)
    nodes = -(-ranks // on_node)
    latency = (ranks - nodes) * intra.latency + (nodes - 1) * inter.latency
    crossing, within = (nodes > 1) / on_node, num_bytes  # a ring leaves a node once, by the cards of all its ranks
    if kind == "send":
        crossing, latency = float(nodes > 1), inter.latency if nodes > 1 else intra.latency
    elif kind == "all-to-all":
        crossing = (ranks - on_node) / max(ranks - 1, 1)
    if kind in ("send", "all-to-all"):
        within = num_bytes * (1 - crossing)
    steps = times * (2 if kind == "all-reduce" else 1)  # a reduce-scatter and an all-gather
    seconds = steps * latency + max(within / intra.bandwidth, num_bytes * crossing / inter.bandwidth)
    return seconds * device.slowdown(mesh.num_ranks)


def computing(work: Mapping[Work, int], peak: float, mesh: Mesh, device: Device) -> float:
    """Return the seconds of operators, each at the speed of products or of memory, whichever takes longer."""
    speed = peak * device.max_share
    roofline = (max(each.flops / speed, each.num_bytes / device.memory_bandwidth) * n for each, n in work.items())
    return sum(roofline) * device.slowdown(mesh.num_ranks)


def rank_time(rank: RankEstimate, peak: float, mesh: Mesh, device: Device) -> StepTime:
    """Return the seconds of all micro-batches of a rank, without waiting."""

    def total(rows: Iterable[Traffic]) -> float:
        return sum(sending(row.kind, row.axis.split(", "), row.times, row.bytes, mesh, device) for row in rows)

    weights = [row for row in rank.traffic if row.purpose.startswith(WEIGHTS)]
    compute, moved = computing(rank.work, peak, mesh, device), total(weights)
    state = rank.total - rank.memory["activations"] - rank.memory["temporary"]
    update = 2 * state / device.memory_bandwidth * device.slowdown(mesh.num_ranks)
    hidden = device.overlap * min(moved, compute)
    others = total(row for row in rank.traffic if row not in weights)
    return StepTime(compute + update, moved - hidden + others)


def step_time(
    ranks: Sequence[RankEstimate], num_micro_batches: int, peak: float, mesh: Mesh, device: Device
) -> StepTime:
    """Return the seconds of a step on the rank that is busy longest, with the schedule 1F1B if there are stages.

    Seconds are the sum of the stages' times of a micro-batch, plus M - 1 times the longest of them.
    """
    times = [rank_time(rank, peak, mesh, device) for rank in ranks]
    slowest = max(times, key=lambda time: time.seconds)
    bubble = (sum(time.seconds for time in times) - slowest.seconds) / num_micro_batches
    return replace(slowest, bubble=bubble)
