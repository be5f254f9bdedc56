"""Shards of matrices on every rank, and the owner of each matrix: the rank that orthogonalises it."""

import heapq
import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any, NamedTuple, TypeAlias

import torch

from maxmoe.declaration import gate_up_slices
from maxmoe.optim.newton_schulz import Matrix

Range: TypeAlias = tuple[int, int]  # start and stop
Split: TypeAlias = tuple[int, int, int]  # size of a mesh axis, coordinate on it, split factor of a strided shard


class MatrixShard(NamedTuple):
    """The shard of a stack of matrices that one rank holds."""

    stacked: tuple[Range, ...]  # along each stacked dim
    rows: Range  # outputs
    columns: Range  # inputs
    local_rows: slice = slice(None)  # the rows in the rank's shard of the parameter, which holds gate and up if fused

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the shard of each matrix."""
        return self.rows[1] - self.rows[0], self.columns[1] - self.columns[0]


@dataclass(frozen=True)
class MatrixStack:
    """A sharded stack of matrices."""

    shape: tuple[int, int]  # rows and columns of each matrix, over all ranks
    shards: tuple[MatrixShard, ...]  # of every rank, by position on the mesh

    @property
    def cost(self) -> int:
        """Newton-Schulz operations per matrix, up to a constant factor."""
        short, long = sorted(self.shape)
        return short * short * (2 * long + short)


class OwnerAssignment(NamedTuple):
    """Consecutive matrices of a stack and the rank that orthogonalises them. A rank is a position on the mesh."""

    stack: int  # its index
    matrices: Range  # among the matrices whose shards the holders hold
    owner: int
    senders: tuple[int, ...]  # one rank for each distinct shard, which sends it to the owner
    holders: tuple[int, ...]  # all ranks that hold a shard, and receive this shard of the results

    @property
    def num_matrices(self) -> int:
        """Number of matrices in the range."""
        return self.matrices[1] - self.matrices[0]


def matrix_stacks(
    shape: Sequence[int], mesh_shape: Sequence[int], placements: Sequence[Any], matrix: Matrix
) -> list[MatrixStack]:
    """Return the stacks of matrices in a DTensor: two if gate and up are fused, none if no axis shards the matrices."""
    for placement in placements:
        if placement.is_partial():
            raise ValueError(f"a parameter must not be a partial sum, got the placement {placement}")
    # Shard and _StridedShard have no base class for `dim`.
    dims = [None if placement.is_replicate() else placement.dim % len(shape) for placement in placements]
    if not any(size > 1 and dim in range(len(shape))[-2:] for size, dim in zip(mesh_shape, dims, strict=True)):
        return []
    outputs = range(shape[-3 - matrix.input_dim])
    halves = [slice(None)] if matrix.fused_gate is None else gate_up_slices(len(outputs), matrix.fused_gate)
    held = []  # by each rank: the range of every dim
    for coordinates in itertools.product(*map(range, mesh_shape)):
        splits: list[list[Split]] = [[] for _ in shape]
        for dim, size, coordinate, placement in zip(dims, mesh_shape, coordinates, placements, strict=True):
            if dim is not None:
                splits[dim].append((size, coordinate, getattr(placement, "split_factor", 1)))
        held.append([_shard_range(length, tuple(split)) for length, split in zip(shape, splits, strict=True)])
    return [
        MatrixStack(
            (len(outputs[half]), shape[matrix.input_dim]),
            tuple(_matrix_shard(ranges, outputs[half], matrix) for ranges in held),
        )
        for half in halves
    ]


def _matrix_shard(ranges: Sequence[Range], outputs: range, matrix: Matrix) -> MatrixShard:
    """Return the shard of the matrices with rows `outputs` that a rank with these `ranges` of the parameter holds."""
    *stacked, _, _ = ranges
    held, columns = ranges[-3 - matrix.input_dim], ranges[matrix.input_dim]
    first, last = (bisect_left(outputs, bound) for bound in held)
    rows = outputs[first:last]
    local_rows = slice(rows.start - held[0], rows.stop - held[0], rows.step)
    return MatrixShard(tuple(stacked), (first, last), columns, local_rows)


@cache
def _shard_range(length: int, splits: tuple[Split, ...]) -> Range:
    """Split a dim as DTensor does, by one mesh axis after another. Shards may be uneven."""
    indices = torch.arange(length)
    for size, coordinate, split_factor in splits:
        blocks = [strip.chunk(size) for strip in indices.chunk(split_factor)]
        indices = torch.cat([block[coordinate] if coordinate < len(block) else block[0][:0] for block in blocks])
    if not len(indices):
        return (0, 0)
    first, last = int(indices[0]), int(indices[-1]) + 1
    if last - first != len(indices):
        raise ValueError(f"a rank must hold consecutive indices of a dim, got {indices.tolist()} of {length}")
    return first, last


def assign_owners(stacks: Sequence[MatrixStack], bucket_size: int) -> list[list[OwnerAssignment]]:
    """Assign every matrix to an owner, in buckets. The result is the same on every rank.

    The owner of a matrix is the rank with the least work so far among the ranks that hold a shard of it. Consecutive
    matrices of a stack are assigned together. If several ranks hold the same shard, one of them sends it to the owner.
    A bucket ends after `bucket_size` matrix elements per rank.
    """
    loads: dict[int, int] = defaultdict(int)
    buckets: list[list[OwnerAssignment]] = [[]]
    size = 0
    for index, stack in enumerate(stacks):
        holders_of: dict[tuple[Range, ...], list[int]] = defaultdict(list)  # ranks with shards of the same matrices
        for rank, shard in enumerate(stack.shards):
            holders_of[shard.stacked].append(rank)
        counts = [prod(stop - start for start, stop in stacked) for stacked in holders_of]
        total = prod(stack.shape) * sum(counts)
        limit = bucket_size * len(stack.shards)
        num_segments = -(-total // limit)
        for segment in range(num_segments):
            for count, ranks in zip(counts, holders_of.values(), strict=True):
                matrices = segment * count // num_segments, (segment + 1) * count // num_segments
                buckets[-1] += _assign(index, stack, matrices, ranks, loads)
            size += total // num_segments
            if size >= limit:
                buckets.append([])
                size = 0
    return [bucket for bucket in buckets if bucket]


def _assign(
    index: int, stack: MatrixStack, matrices: Range, ranks: Sequence[int], loads: dict[int, int]
) -> Iterator[OwnerAssignment]:
    """Assign a range of matrices to `ranks`, which hold shards of them, and add the work to their `loads`."""
    replicas: dict[tuple[Range, Range], list[int]] = defaultdict(list)  # ranks with the same shard
    for rank in ranks:
        shard = stack.shards[rank]
        if prod(shard.shape):
            replicas[shard.rows, shard.columns].append(rank)
    replica_of = {rank: number for same_shard in replicas.values() for number, rank in enumerate(same_shard)}
    queue = [(loads[rank], rank) for rank in ranks]
    heapq.heapify(queue)
    counts = dict.fromkeys(ranks, 0)
    first, last = matrices
    for _ in range(last - first):
        load, rank = queue[0]
        counts[rank] += 1
        heapq.heapreplace(queue, (load + stack.cost, rank))

    @cache  # most owners have the same senders
    def senders(number: int) -> tuple[int, ...]:
        return tuple(same_shard[number % len(same_shard)] for same_shard in replicas.values())

    holders = tuple(replica_of)
    for rank, count in counts.items():
        if count:
            loads[rank] += count * stack.cost
            yield OwnerAssignment(index, (first, first + count), rank, senders(replica_of.get(rank, 0)), holders)
            first += count
