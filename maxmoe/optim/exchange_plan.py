"""Which rank orthogonalises which matrices, where no rank holds whole ones."""

import heapq
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

Range = tuple[int, int]  # start and stop


class Part(NamedTuple):
    """What a rank holds of a stack of matrices.

    Args:
        stacked: the range along each stacked dim.
        rows: of each matrix.
        columns: of each matrix.
    """

    stacked: tuple[Range, ...]
    rows: Range
    columns: Range

    @property
    def num_matrices(self) -> int:
        """Whole or in part."""
        return prod(stop - start for start, stop in self.stacked)

    @property
    def shape(self) -> tuple[int, int]:
        """Of the part of each matrix."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class Stack:
    """A stack of matrices, sharded.

    Args:
        shape: of each matrix.
        parts: by rank.
    """

    shape: tuple[int, int]
    parts: tuple[Part, ...]

    @property
    def cost(self) -> int:
        """Of a matrix: proportional to the operations of Newton-Schulz."""
        short, long = sorted(self.shape)
        return short * short * (2 * long + short)


class Job(NamedTuple):
    """Matrices that one rank orthogonalises.

    Args:
        stack: its index.
        matrices: the range, of those that the ranks in `holders` have.
        owner: the rank.
        senders: the ranks whose parts make up the matrices, one for each part.
        holders: all ranks that have a part, and get it back.
    """

    stack: int
    matrices: Range
    owner: int
    senders: tuple[int, ...]
    holders: tuple[int, ...]

    @property
    def num_matrices(self) -> int:
        """Of the range."""
        return self.matrices[1] - self.matrices[0]


def plan_buckets(stacks: Sequence[Stack], bucket_size: int) -> list[list[Job]]:
    """Share out matrices among ranks.

    Every rank that holds a part of a matrix may be its owner. Each matrix goes to the one with the least work so far;
    neighbours in a stack go together. Parts come from the ranks that differ from the owner only on the axes that shard
    the matrix, so that of equal parts one is sent.

    Args:
        stacks: in the same order on every rank.
        bucket_size: elements of matrices for each rank, after which a bucket ends.

    Returns:
        The jobs of each bucket, the same on every rank.
    """
    loads: dict[int, int] = defaultdict(int)
    buckets: list[list[Job]] = [[]]
    size = 0
    for number, stack in enumerate(stacks):
        limit = bucket_size * len(stack.parts)
        holders_of = _holders(stack)
        total = prod(stack.shape) * sum(stacked_size(stacked) for stacked in holders_of)
        num_segments = -(-total // limit)
        for segment in range(num_segments):
            for stacked, ranks in holders_of.items():
                count = stacked_size(stacked)
                matrices = segment * count // num_segments, (segment + 1) * count // num_segments
                buckets[-1] += _share_out(number, stack, matrices, ranks, loads)
            size += total // num_segments
            if size >= limit:
                buckets.append([])
                size = 0
    return [bucket for bucket in buckets if bucket]


def stacked_size(stacked: tuple[Range, ...]) -> int:
    """Count the matrices in a range of each stacked dim."""
    return prod(stop - start for start, stop in stacked)


def _holders(stack: Stack) -> dict[tuple[Range, ...], list[int]]:
    """The ranks that hold parts of the same matrices, by the ranges of these."""
    holders: dict[tuple[Range, ...], list[int]] = defaultdict(list)
    for rank, part in enumerate(stack.parts):
        if part.num_matrices:
            holders[part.stacked].append(rank)
    return holders


def _share_out(
    number: int, stack: Stack, matrices: Range, ranks: Sequence[int], loads: dict[int, int]
) -> Iterator[Job]:
    """Jobs for a range of matrices of which `ranks` hold the parts."""
    replicas: dict[tuple[Range, Range], list[int]] = defaultdict(list)
    for rank in ranks:
        if prod(stack.parts[rank].shape):
            replicas[stack.parts[rank].rows, stack.parts[rank].columns].append(rank)
    place = {rank: index for alike in replicas.values() for index, rank in enumerate(alike)}
    first, last = matrices
    queue = [(loads[rank], rank) for rank in ranks]
    heapq.heapify(queue)
    counts = dict.fromkeys(ranks, 0)
    for _ in range(last - first):
        load, rank = heapq.heappop(queue)
        counts[rank] += 1
        heapq.heappush(queue, (load + stack.cost, rank))
    holders = tuple(place)

    @cache  # most owners have the same senders
    def senders(number: int) -> tuple[int, ...]:
        return tuple(alike[number % len(alike)] for alike in replicas.values())

    for rank, count in counts.items():
        if count:
            loads[rank] += count * stack.cost
            yield Job(number, (first, first + count), rank, senders(place.get(rank, 0)), holders)
            first += count
