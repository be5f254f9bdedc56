"""The collectives that a move consists of, and the bytes that they carry."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.movement import Layout, Move


class Collective(NamedTuple):
    """One collective over one axis.

    Args:
        kind: "all-gather", "reduce-scatter" or "all-reduce".
        axis: of the mesh.
        bytes: that each rank receives, and as many that it sends, along a ring of n ranks: (n - 1) / n of the gathered
            tensor, the same of the tensor before a scatter, and both for an all-reduce.
    """

    kind: str
    axis: str
    bytes: int


def collectives(move: Move, mesh: Mesh, shape: Sequence[int], itemsize: int) -> Iterator[Collective]:
    """List the collectives of a move.

    Args:
        move: from layout to layout; a slice is no collective.
        mesh: of the ranks, planned or not.
        shape: of the tensor where the layouts do not shard it.
        itemsize: bytes of a number.

    Yields:
        One for each step of the move that communicates.
    """
    before = move.source
    for after in move.steps(mesh):
        gathered = _axes(before) - _axes(after)
        summed = set(before.sums) - set(after.sums)
        scattered = (_axes(after) - _axes(before)) & summed
        whole = after if gathered else before
        num_bytes = math.prod(shape) // mesh.size(*_axes(whole)) * itemsize
        for kind, axes, passes in (
            ("all-gather", gathered, 1),
            ("reduce-scatter", scattered, 1),
            ("all-reduce", summed - scattered, 2),
        ):
            for axis in axes:
                yield Collective(kind, axis, passes * num_bytes * (mesh.size(axis) - 1) // mesh.size(axis))
        before = after


def _axes(layout: Layout) -> set[str]:
    return {axis for axes in layout.spec for axis in axes}
