"""Collectives of a training step, with their bytes: each is planned beside the code that runs it."""

import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.redistribute import redistribution_steps


class PlannedCollective(NamedTuple):
    """One collective of a training step.

    Args:
        purpose: which tensor it moves, and whether in the forward or in the backward.
        kind: "all-gather", "reduce-scatter", "all-reduce" or "all-to-all".
        axes: axes of the mesh whose ranks take part, in the order of the mesh.
        bytes: bytes that each rank receives, and as many that it sends, along a ring of n ranks: (n - 1) / n of the
            gathered tensor, the same of the tensor before a reduce-scatter, both for an all-reduce, and (n - 1) / n of
            the tensor that is sent in an all-to-all to whose ranks as many rows go.
        bucket: name of the bucket whose collectives share one call; None for a collective with its own.
    """

    purpose: str
    kind: str
    axes: tuple[str, ...]
    bytes: int
    bucket: str | None = None


def planned_redistribution(
    purpose: str,
    source: NamedSharding,
    target: NamedSharding,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    bucket: str | None = None,
) -> Iterator[PlannedCollective]:
    """List the collectives of a redistribution, each over one axis.

    Args:
        purpose: purpose of the collectives.
        source: sharding before.
        target: sharding after.
        shape: shape of the tensor over all ranks that the two shard it over.
        dtype: dtype of the tensor.
        bucket: bucket of the collectives.

    Yields:
        The collectives in the order of `redistribution_steps`; a slice needs none.
    """
    mesh, before = source.mesh, source
    for after in redistribution_steps(source, target):
        gathered = _axes(before) - _axes(after)
        reduced = set(before.partial) - set(after.partial)
        scattered = (_axes(after) - _axes(before)) & reduced
        larger = after if gathered else before
        num_bytes = math.prod(shape) // mesh.size(*_axes(larger)) * dtype.itemsize
        for kind, axes, passes in (
            ("all-gather", gathered, 1),
            ("reduce-scatter", scattered, 1),
            ("all-reduce", reduced - scattered, 2),
        ):
            for axis in axes:
                sent = passes * num_bytes * (mesh.size(axis) - 1) // mesh.size(axis)
                yield PlannedCollective(purpose, kind, (axis,), sent, bucket)
        before = after


def _axes(sharding: NamedSharding) -> set[str]:
    return {axis for axes in sharding.spec for axis in axes}
