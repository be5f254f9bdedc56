"""A partition spec on a mesh: the part of a tensor that each rank holds."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.partition_spec import PartitionSpec


@dataclass(frozen=True)
class NamedSharding:
    """How a tensor lies on a mesh.

    The axes of a dim split it in their order: in P(("expert", "fsdp")) `expert` cuts it into blocks, and `fsdp` each
    block again. Ranks that differ on other axes only hold the same part.

    Args:
        mesh: the mesh, planned or not.
        spec: the axes of each dim.

    Raises:
        ValueError: for an axis that the mesh does not have.

    Source: `jax.sharding.NamedSharding`.
    """

    mesh: Mesh
    spec: PartitionSpec

    def __post_init__(self) -> None:
        for dim, axes in enumerate(self.spec):
            for axis in axes:
                if axis not in self.mesh.sizes:
                    raise ValueError(
                        f"axis {axis!r} shards dim {dim} of {self.spec!r}, but {self.mesh} has no such axis"
                    )

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The same for DTensor: one placement per axis of `mesh.device_mesh`.

        DTensor lets the outer axes of the mesh split first. An axis that splits a dim after axes that lie further in
        on the mesh takes a strided shard.
        """
        position = {axis: index for index, axis in enumerate(self.mesh.axes)}
        placements: list[Placement] = [Replicate()] * max(len(position), 1)
        for dim, axes in enumerate(self.spec):
            large = [axis for axis in axes if axis in position]
            for index, axis in enumerate(large):
                split_before = [major for major in large[:index] if position[major] > position[axis]]
                factor = self.mesh.size(*split_before)
                placements[position[axis]] = Shard(dim) if factor == 1 else _StridedShard(dim, split_factor=factor)
        return tuple(placements)

    def without(self, *axes: str) -> "NamedSharding":
        """Return the sharding after gathering over `axes`."""
        return NamedSharding(self.mesh, self.spec.without(*axes))

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Compute the shape of every rank's part.

        Args:
            shape: of the whole tensor.

        Returns:
            Every dim divided by the sizes of its axes.

        Raises:
            ValueError: if the lengths differ, or a dim does not divide.
        """
        if len(shape) != len(self.spec):
            raise ValueError(f"{self.spec!r} has {len(self.spec)} dims, the shape {tuple(shape)} has {len(shape)}")
        for dim, axes in enumerate(self.spec):
            if shape[dim] % self.mesh.size(*axes):
                product = " * ".join(f"{axis}={self.mesh.size(axis)}" for axis in axes)
                raise ValueError(f"dim {dim} of the shape {tuple(shape)} is not divisible by {product}")
        return tuple(length // self.mesh.size(*axes) for length, axes in zip(shape, self.spec, strict=True))

    def slices(self, shape: Sequence[int], rank: int | None = None) -> tuple[slice, ...]:
        """Find a rank's part of a tensor.

        Args:
            shape: of the whole tensor.
            rank: within the mesh; None for this process.

        Returns:
            One slice per dim: ``tensor[sharding.slices(tensor.shape)]``.

        Raises:
            ValueError: as `shard_shape` and `Mesh.coordinates`.
        """
        place = self.mesh.coordinates(rank)
        slices = []
        for axes, length in zip(self.spec, self.shard_shape(shape), strict=True):
            index = 0
            for axis in axes:
                index = index * self.mesh.size(axis) + place[axis]
            slices.append(slice(index * length, (index + 1) * length))
        return tuple(slices)

    def bytes(self, shape: Sequence[int], dtype: torch.dtype) -> int:
        """Compute the bytes of every rank's part of a tensor of this shape and dtype."""
        return math.prod(self.shard_shape(shape)) * dtype.itemsize
