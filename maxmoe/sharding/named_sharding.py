"""Partition specs, and what they are on a mesh: the shard of a tensor that each rank holds."""

import math
import reprlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from maxmoe._torch import strided_shard
from maxmoe.sharding.mesh import Mesh

Axes: TypeAlias = str | Sequence[str] | None


def axis_tuple(axes: object, owner: str) -> tuple[str, ...]:
    """Convert None, an axis or a sequence of axes to a tuple of axes; error messages begin with `owner`."""
    entries = (axes,) if isinstance(axes, str) else () if axes is None else axes
    if not isinstance(entries, list | tuple) or not all(isinstance(axis, str) and axis for axis in entries):
        raise ValueError(f"{owner} must be None, an axis or a tuple of axes, got {reprlib.repr(axes)}")
    if len(set(entries)) < len(entries):
        repeated = next(axis for axis, count in Counter(entries).items() if count > 1)
        raise ValueError(f"{owner} has the axis {reprlib.repr(repeated)} twice: {reprlib.repr(axes)}")
    return tuple(entries)


class PartitionSpec(tuple[tuple[str, ...], ...]):
    """The mesh axes that shard each dim of a tensor, the major axis of a dim first.

        P("fsdp", None, ("expert", "tensor")) == (("fsdp",), (), ("expert", "tensor"))

    Args:
        *dims: one entry per dim: None for a dim that is not sharded, an axis, or a tuple of axes. Iterating over the
            spec always yields tuples of axes.

    Raises:
        ValueError: for an entry of another type, and for an axis that shards more than one dim.

    Source: `jax.sharding.PartitionSpec`.
    """

    __slots__ = ()

    def __new__(cls, *dims: Axes) -> "PartitionSpec":
        """Check the entries, and that no two dims share an axis."""
        owners = (f"dim {dim} of a PartitionSpec" for dim in range(len(dims)))
        spec = super().__new__(cls, map(axis_tuple, dims, owners))
        first_dim: dict[str, int] = {}
        for dim, axes in enumerate(spec):
            for axis in axes:
                if first_dim.setdefault(axis, dim) != dim:
                    raise ValueError(f"axis {axis!r} shards dim {first_dim[axis]} and dim {dim} of {spec!r}")
        return spec

    def __getnewargs__(self) -> tuple[tuple[str, ...], ...]:  # copy and pickle call __new__ with these
        return tuple(self)

    def __repr__(self) -> str:
        return f"P({', '.join(repr(axes[0] if len(axes) == 1 else axes or None) for axes in self)})"

    def without(self, *axes: str) -> "PartitionSpec":
        """Return the spec after an all-gather over `axes`: P("fsdp", "tensor").without("fsdp") is P(None, "tensor")."""
        return PartitionSpec(*(tuple(axis for axis in entry if axis not in axes) for entry in self))


P = PartitionSpec


@dataclass(frozen=True)
class NamedSharding:
    """How a tensor is sharded on a mesh.

    The axes of a dim split it in their order: in P(("expert", "fsdp")), `expert` splits the dim into blocks and `fsdp`
    splits each block. The tensor is replicated over all other axes, except the axes in `partial`, over which every rank
    holds a summand of the tensor (DTensor's Partial, JAX's unreduced).

    Args:
        mesh: mesh on which the tensor is sharded; may be planned.
        spec: mesh axes that shard each dim.
        partial: mesh axes over which the tensor is an unreduced sum.

    Raises:
        ValueError: for an axis that the mesh does not have, and for an axis that shards a dim and is partial.

    Source: `jax.sharding.NamedSharding`.
    """

    mesh: Mesh
    spec: PartitionSpec
    partial: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for axis in self.partial:
            if axis not in self.mesh.sizes:
                raise ValueError(f"axis {axis!r} is partial, but {self.mesh} has no such axis")
        for dim, axes in enumerate(self.spec):
            for axis in axes:
                if axis not in self.mesh.sizes or axis in self.partial:
                    problem = " and is partial" if axis in self.partial else f", but {self.mesh} has no such axis"
                    raise ValueError(f"axis {axis!r} shards dim {dim} of {self.spec!r}{problem}")

    @classmethod
    def replicated(cls, mesh: Mesh, num_dims: int, *, partial: tuple[str, ...] = ()) -> "NamedSharding":
        """Return the sharding of a tensor of `num_dims` dims that no axis shards."""
        return cls(mesh, PartitionSpec(*(None,) * num_dims), partial)

    @cached_property
    def placements(self) -> tuple[Placement, ...]:
        """DTensor placements of this sharding, one per axis of `mesh.device_mesh`.

        DTensor splits a dim by the outer axes of the mesh first. An axis that comes after an inner axis in the spec of
        its dim therefore becomes a strided shard.
        """
        position = {axis: index for index, axis in enumerate(self.mesh.axes)}
        placements: list[Placement] = [Replicate()] * max(len(position), 1)
        for dim, axes in enumerate(self.spec):
            large = [axis for axis in axes if axis in position]
            for index, axis in enumerate(large):
                split_before = [major for major in large[:index] if position[major] > position[axis]]
                factor = self.mesh.size(*split_before)
                placements[position[axis]] = Shard(dim) if factor == 1 else strided_shard(dim, factor)
        for axis in self.partial:
            if axis in position:
                placements[position[axis]] = Partial()
        return tuple(placements)

    def without(self, *axes: str) -> "NamedSharding":
        """Return the sharding after an all-gather over `axes`."""
        return replace(self, spec=self.spec.without(*axes))

    def shard_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Compute the shape of each rank's shard of a global tensor: each dim is divided by the sizes of its axes.

        Raises:
            ValueError: if shape and spec differ in length, or the axes of a dim do not divide its length.
        """
        if len(shape) != len(self.spec):
            raise ValueError(f"{self.spec!r} has {len(self.spec)} dims, the shape {tuple(shape)} has {len(shape)}")
        for dim, axes in enumerate(self.spec):
            if shape[dim] % self.mesh.size(*axes):
                product = " * ".join(f"{axis}={self.mesh.size(axis)}" for axis in axes)
                raise ValueError(f"dim {dim} of the shape {tuple(shape)} is not divisible by {product}")
        return tuple(length // self.mesh.size(*axes) for length, axes in zip(shape, self.spec, strict=True))

    def slices(self, shape: Sequence[int], rank: int | None = None) -> tuple[slice, ...]:
        """Compute the slices of the shard of a rank, None for this process: ``tensor[sharding.slices(tensor.shape)]``.

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
        """Compute the number of bytes of each rank's shard of a tensor with this global shape and dtype."""
        return math.prod(self.shard_shape(shape)) * dtype.itemsize
