"""Collectives of a step, added up by what they are for."""

from collections.abc import Iterable
from typing import NamedTuple

from maxmoe.sharding.planned_collective import PlannedCollective
from maxmoe.text_table import readable_bytes


class Traffic(NamedTuple):
    """Collectives of one kind over one axis, in one step.

    Args:
        purpose: of which tensors, and whether in the forward or in the backward.
        kind: "all-gather", "reduce-scatter", "all-reduce" or "all-to-all".
        axis: of the mesh; "context, expert" for the ranks along both.
        times: how many there are.
        bytes: that a rank sends in all of them, and receives; see `PlannedCollective`.
    """

    purpose: str
    kind: str
    axis: str
    times: int
    bytes: int

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        """Its row in a table."""
        return self.purpose, self.kind, self.axis, str(self.times), readable_bytes(self.bytes)


def traffic_of(collectives: Iterable[PlannedCollective]) -> tuple[Traffic, ...]:
    """Add up the collectives of a step.

    Args:
        collectives: of the step.

    Returns:
        A row for each purpose, kind and axis, sorted.
    """
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
