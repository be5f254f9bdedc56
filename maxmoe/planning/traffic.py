"""Sums of the planned collectives per training step."""

from collections.abc import Iterable
from typing import NamedTuple

from maxmoe.sharding.planned_collective import PlannedCollective
from maxmoe.text_table import readable_bytes


class Traffic(NamedTuple):
    """Collectives per step with the same purpose, kind and mesh axis.

    Args:
        purpose: tensors that are communicated, and whether in the forward or in the backward.
        kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", or "send" for messages between stages.
        axis: mesh axis; "context, expert" for the ranks along both axes.
        times: number of collectives.
        bytes: number of bytes that a rank sends in all of them, and receives; see `PlannedCollective`.
    """

    purpose: str
    kind: str
    axis: str
    times: int
    bytes: int

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Cells of the row in a table."""
        return self.purpose, self.kind, self.axis, str(self.times), readable_bytes(self.bytes)


def traffic_of(collectives: Iterable[PlannedCollective]) -> tuple[Traffic, ...]:
    """Add up collectives by purpose, kind and axis, sorted. Collectives with the same bucket count once."""
    total: dict[tuple[str, str, str], list[int]] = {}
    buckets = set()
    for collective in collectives:
        key = (collective.purpose, collective.kind, ", ".join(collective.axes))
        counted = total.setdefault(key, [0, 0])
        if collective.bucket is None or (key, collective.bucket) not in buckets:
            counted[0] += 1
            buckets.add((key, collective.bucket))
        counted[1] += collective.bytes
    return tuple(Traffic(*key, times, num_bytes) for key, (times, num_bytes) in sorted(total.items()))
