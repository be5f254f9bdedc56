"""Collectives of a training step, with their bytes: each is planned beside the code that runs it."""

import math
from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

import torch

from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.redistribute import Redistribution, redistribution_steps

CollectiveKind: TypeAlias = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]


class PlannedCollective(NamedTuple):
    """One collective of a training step.

    Args:
        purpose: which tensor it moves, and whether in the forward or in the backward.
        kind: kind of the collective.
        axes: axes of the mesh whose ranks take part, in the order of the mesh.
        bytes: bytes that each rank sends, equal to the bytes that it receives, on a ring of n ranks: (n - 1) / n of the
            output of an all-gather, of the input of a reduce-scatter, and of the input of an all-to-all with equal
            splits; twice (n - 1) / n of the tensor in an all-reduce. A "send" is a message to one other rank.
        bucket: name of the bucket whose collectives share one call; None for a collective with its own.
    """

    purpose: str
    kind: CollectiveKind
    axes: tuple[str, ...]
    bytes: int
    bucket: str | None = None


def planned_redistribution(
    purpose: str,
    redistribution: Redistribution,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    is_repeated: bool = False,
) -> Iterator[PlannedCollective]:
    """List the collectives of a redistribution and of its backward.

    Args:
        purpose: name of the tensor.
        redistribution: shardings before and after.
        shape: shape of the tensor over all ranks over which it is sharded.
        dtype: dtype of the tensor.
        is_repeated: whether activation checkpointing repeats the forward in the backward.
    """
    yield from planned_steps(f"{purpose}, forward", *redistribution.forward, shape, dtype)
    if is_repeated:
        yield from planned_steps(f"{purpose}, backward", *redistribution.forward, shape, dtype)
    yield from planned_steps(f"{purpose}, backward", *redistribution.backward, shape, dtype)


def planned_steps(
    purpose: str, source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[PlannedCollective]:
    """List the collectives of `redistribution_steps`, each over one axis; a slice needs none."""
    mesh, before = source.mesh, source
    for after in redistribution_steps(source, target):
        gathered = _axes(before) - _axes(after)
        reduced = set(before.partial) - set(after.partial)
        scattered = (_axes(after) - _axes(before)) & reduced
        larger = after if gathered else before
        num_bytes = math.prod(shape) // mesh.size(*_axes(larger)) * dtype.itemsize
        kinds: tuple[tuple[CollectiveKind, set[str], int], ...] = (
            ("all-gather", gathered, 1),
            ("reduce-scatter", scattered, 1),
            ("all-reduce", reduced - scattered, 2),
        )
        for kind, axes, passes in kinds:
            for axis in axes:
                sent = passes * num_bytes * (mesh.size(axis) - 1) // mesh.size(axis)
                yield PlannedCollective(purpose, kind, (axis,), sent)
        before = after


def _axes(sharding: NamedSharding) -> set[str]:
    return {axis for axes in sharding.spec for axis in axes}
