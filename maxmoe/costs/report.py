"""Costs of a step on each rank along the axis `stage`, and their tables."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from maxmoe.costs.measured import Measured, Work
from maxmoe.text_table import readable_bytes, report


class Traffic(NamedTuple):
    """Collectives per step with the same purpose, kind and mesh axes.

    Args:
        purpose: tensors that are communicated, and whether in the forward or in the backward.
        kind: "all-gather", "reduce-scatter", "all-reduce", "all-to-all", or "send" for messages between stages.
        axis: mesh axis; "context, expert" for the ranks along both axes.
        times: number of collectives.
        bytes: number of bytes that a rank sends in all of them, and receives.
    """

    purpose: str
    kind: str
    axis: str
    times: int
    bytes: int


@dataclass(frozen=True)
class RankEstimate:
    """Costs of a rank along the axis `stage`.

    Args:
        stages: stages of the rank.
        memory: bytes by purpose, when the micro-batches in flight take the most. "activations" are what autograd keeps
            between forward and backward; "temporary" is what else is in memory when it is fullest: gathered
            parameters, their gradients before they are reduced, recomputed activations, results of operators.
        traffic: messages and collectives of a step.
        work: operators of a step by their floating-point operations and the bytes that they read and write.
    """

    stages: tuple[int, ...]
    memory: Mapping[str, int]
    traffic: tuple[Traffic, ...]
    work: Mapping[Work, int] = field(repr=False)

    @property
    def total(self) -> int:
        """Bytes of all purposes."""
        return sum(self.memory.values())

    @property
    def flops(self) -> int:
        """Floating-point operations of products and attention in a step."""
        return sum(work.flops * times for work, times in self.work.items())

    @property
    def sent_bytes(self) -> int:
        """Bytes that the rank sends to the ranks of other stages in a step."""
        return sum(row.bytes for row in self.traffic if row.kind == "send")


@dataclass(frozen=True)
class Estimate:
    """Result of `estimate`. As a string, tables as wide as the terminal.

    Args:
        ranks: costs of each rank along the axis `stage`; of one rank without stages.
    """

    ranks: tuple[RankEstimate, ...]

    @property
    def largest(self) -> int:
        """Rank along the axis `stage` that needs the most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].total)

    @property
    def memory(self) -> Mapping[str, int]:
        """Bytes by purpose of the rank that needs the most memory."""
        return self.ranks[self.largest].memory

    @property
    def traffic(self) -> tuple[Traffic, ...]:
        """Messages and collectives of the rank that needs the most memory."""
        return self.ranks[self.largest].traffic

    @property
    def flops(self) -> int:
        """Floating-point operations of a step, on the rank with the most."""
        return max(rank.flops for rank in self.ranks)

    def __str__(self) -> str:
        has_stages = len(self.ranks) > 1
        where = f"of rank {self.largest} along stage" if has_stages else "per rank"
        memory = [(f"memory {where}", "bytes")]
        memory += [(name, readable_bytes(count)) for name, count in self.memory.items()]
        memory.append(("total", readable_bytes(sum(self.memory.values()))))
        heading = f"messages and collectives {where}, per step" if has_stages else "collectives per step"
        traffic = [(heading, "kind", "axis", "times", "bytes sent per rank")]
        traffic += [(*row[:3], str(row.times), readable_bytes(row.bytes)) for row in self.traffic]
        total = readable_bytes(sum(row.bytes for row in self.traffic))
        traffic.append(("total", "", "", str(sum(row.times for row in self.traffic)), total))
        flops = f"{self.flops / 1e12:,.3g} TFLOP of products and attention per step and rank"
        return report([*([self._table()] if has_stages else []), memory, traffic, flops])

    def _table(self) -> list[tuple[str, ...]]:
        """Return the rows of a table of all ranks, without the columns of what no rank has."""
        purposes = [name for name in self.memory if any(rank.memory[name] for rank in self.ranks)]
        first = "stages" if len(self.ranks[0].stages) > 1 else "stage"
        rows: list[tuple[str, ...]] = [(first, *purposes, "total", "sent")]
        for rank in self.ranks:
            numbers = [*(rank.memory[name] for name in purposes), rank.total, rank.sent_bytes]
            rows.append((", ".join(map(str, rank.stages)), *map(readable_bytes, numbers)))
        return rows


def traffic_of(measured: Measured) -> tuple[Traffic, ...]:
    """Return the collectives of a step, sorted."""
    times, sent = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for flow, count in measured.flows.items():
        times[flow[:3]] += count
        sent[flow[:3]] += count * flow.num_bytes
    return tuple(Traffic(*key, times[key], sent[key]) for key in sorted(times) if times[key])
