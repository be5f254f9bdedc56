"""Collectives of a training step, with their bytes: each is planned beside the code that runs it."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import torch

from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.redistribute import Redistribution, Step, joint_steps, redistribution_steps

CollectiveKind: TypeAlias = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send"]


class PlannedCollective(NamedTuple):
    """One collective of a training step.

    Args:
        purpose: which tensor it moves, and whether in the forward or in the backward.
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
    """List the collectives of a redistribution of a tensor with this shape over all ranks, and of its backward.

    `is_repeated`: activation checkpointing repeats the forward in the backward.
    """
    yield from planned_steps(f"{purpose}, forward", *redistribution.forward, shape, dtype)
    if is_repeated:
        yield from planned_steps(f"{purpose}, backward", *redistribution.forward, shape, dtype)
    yield from planned_steps(f"{purpose}, backward", *redistribution.backward, shape, dtype)


def planned_steps(
    purpose: str, source: NamedSharding, target: NamedSharding, shape: tuple[int, ...], dtype: torch.dtype
) -> Iterator[PlannedCollective]:
    """List the collectives of `redistribution_steps`, each over one axis; a slice needs none."""
    for step in redistribution_steps(source, target):
        if step.kind != "slice":
            yield PlannedCollective(purpose, step.kind, step.axes, _sent_bytes(step, shape, dtype))


def planned_joint_steps(
    purpose: str,
    shardings: Sequence[tuple[NamedSharding, NamedSharding]],
    shapes: Sequence[tuple[int, ...]],
    dtype: torch.dtype,
) -> Iterator[PlannedCollective]:
    """List the collectives of `joint_steps` of several tensors."""
    for together in joint_steps(tuple(shardings)):
        _, (kind, axes, *_) = together[0]
        if kind != "slice":
            sent = sum(_sent_bytes(step, shapes[index], dtype) for index, step in together)
            yield PlannedCollective(purpose, kind, axes, sent)


def _sent_bytes(step: Step, shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Return the bytes that each rank sends in a step, see `PlannedCollective`."""
    larger = step.after if step.kind == "all-gather" else step.before
    sharded = (axis for axes in larger.spec for axis in axes)
    num_bytes, size = math.prod(shape) // larger.mesh.size(*sharded) * dtype.itemsize, larger.mesh.size(*step.axes)
    return (2 if step.kind == "all-reduce" else 1) * num_bytes * (size - 1) // size
