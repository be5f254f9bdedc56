"""From logical names to the mesh axes that shard a tensor: first by the rules, then by mesh and shape."""

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from maxmoe.field_checks import nearest
from maxmoe.sharding.partition_spec import PartitionSpec
from maxmoe.sharding.rules import LogicalRules


class DroppedAxis(NamedTuple):
    """A mesh axis of a spec over which the tensor is not sharded.

    Args:
        axis: name of the axis.
        dim: index of the dim that the spec shards over the axis.
        reason: why the axis was dropped.
    """

    axis: str
    dim: int
    reason: str


class Resolution(NamedTuple):
    """Result of `resolve`.

    Args:
        spec: axes that shard each dim; all are on the mesh and larger than one.
        dropped: axes that were removed from the spec.
    """

    spec: PartitionSpec
    dropped: tuple[DroppedAxis, ...]


def logical_to_mesh_axes(names: Sequence[str | None], rules: LogicalRules, *, strict: bool = False) -> PartitionSpec:
    """Map the logical name of each dim to mesh axes.

        for (name, axes) in rules, in order:
            spec[dim of name] = axes, unless that dim has its axes already or one of `axes` is taken

    A rule gives all of its axes or none. A rule without axes applies as well: later rules for its name do not. Dims
    without a rule are not sharded. The sizes of axes and dims are not considered here but in `resolve`.

    Args:
        names: logical name of each dim, None for a dim that is never sharded.
        rules: rules to apply.
        strict: raise for a name without a rule; otherwise warn and leave its dim unsharded.

    Returns:
        Partition spec with one entry per dim.

    Raises:
        ValueError: for a repeated name; if strict, for a name without a rule, with the most similar names of rules.

    Source: `flax.linen.logical_to_mesh_axes`.
    """
    spec = mesh_axes(names, rules)
    for message in unknown_names(names, rules):
        if strict:
            raise ValueError(message)
        warnings.warn(f"{message}; its dim is not sharded", stacklevel=2)
    return spec


def mesh_axes(names: Sequence[str | None], rules: LogicalRules) -> PartitionSpec:
    """Compute `logical_to_mesh_axes` without a warning."""
    dims: dict[str, int] = {}
    for dim, name in enumerate(names):
        if name is not None and dims.setdefault(name, dim) != dim:
            raise ValueError(f"logical name {name!r} is that of dim {dims[name]} and of dim {dim}: {tuple(names)}")
    spec: dict[str | None, tuple[str, ...]] = {}
    taken: set[str] = set()
    for logical, axes in rules:
        if logical in dims and logical not in spec and taken.isdisjoint(axes):
            spec[logical] = axes
            taken.update(axes)
    return PartitionSpec(*(spec.get(name) for name in names))


def unknown_names(names: Sequence[str | None], rules: LogicalRules) -> Iterator[str]:
    """Yield a message for each logical name without a rule, with the most similar names of rules."""
    known = dict.fromkeys(name for name, _ in rules)
    for name in names:
        if name is not None and name not in known:
            message = f"no rule for the logical name {name!r} of {tuple(names)}{nearest(name, known)}"
            yield message


def resolve(
    spec: PartitionSpec, mesh_sizes: Mapping[str, int], shape: Sequence[int], *, strict: bool = False
) -> Resolution:
    """Keep the axes of a spec that can shard a shape evenly on a mesh.

        shape[dim] % prod(sizes of its axes) == 0

    Absent axes and axes of size one are dropped. An axis of a dim is kept if the product of its size and the sizes of
    the axes kept before it divides the length of the dim. DTensor loses rows of a dim that two axes shard unevenly.

    Args:
        spec: partition spec, from `logical_to_mesh_axes` or written by hand.
        mesh_sizes: size of each mesh axis.
        shape: shape of the global tensor.
        strict: raise for a dim that its axes do not divide; otherwise drop axes.

    Returns:
        Spec of the axes that were kept, and the dropped axes with dim and reason.

    Raises:
        ValueError: if spec and shape differ in length; if strict, for a dim that does not divide.

    Source: https://github.com/pytorch/pytorch/issues/194457
    """
    if len(spec) != len(shape):
        raise ValueError(f"{spec!r} has {len(spec)} dims, the shape {tuple(shape)} has {len(shape)}")
    axes_of: list[list[str]] = [[] for _ in shape]
    dropped: list[DroppedAxis] = []
    for dim, axes in enumerate(spec):
        for axis in axes:
            reason = _reason_to_drop(axis, axes_of[dim], mesh_sizes, shape[dim])
            if reason is None:
                axes_of[dim].append(axis)
            else:
                dropped.append(DroppedAxis(axis, dim, reason))
    uneven = [drop for drop in dropped if mesh_sizes.get(drop.axis, 1) > 1]
    if strict and uneven:
        axis, dim, reason = uneven[0]
        raise ValueError(f"axis {axis!r} of {spec!r} cannot shard dim {dim} of the shape {tuple(shape)}: {reason}")
    return Resolution(PartitionSpec(*axes_of), tuple(dropped))


def _reason_to_drop(axis: str, major: Sequence[str], mesh_sizes: Mapping[str, int], length: int) -> str | None:
    """Return why `axis` cannot shard a dim of this length after the `major` axes; None if it can."""
    if axis not in mesh_sizes:
        return "the mesh has no such axis"
    if mesh_sizes[axis] == 1:
        return "its size is 1"
    sizes = [mesh_sizes[name] for name in (*major, axis)]
    if length % math.prod(sizes):
        return f"{length} is not divisible by {' * '.join(map(str, sizes))}"
    return None
