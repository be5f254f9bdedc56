"""Partition spec: the mesh axes that shard each dim of a tensor."""

import reprlib
from collections import Counter
from collections.abc import Sequence
from typing import TypeAlias

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
        spec = super().__new__(
            cls, (axis_tuple(axes, f"dim {dim} of a PartitionSpec") for dim, axes in enumerate(dims))
        )
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
