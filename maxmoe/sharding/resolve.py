"""From logical names to the mesh axes that shard a tensor: first by the rules, then on a mesh, for a shape."""

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from maxmoe.config import nearest
from maxmoe.sharding.partition_spec import PartitionSpec
from maxmoe.sharding.rules import LogicalRules


class DroppedAxis(NamedTuple):
    """A mesh axis that a spec names and a tensor is not sharded over.

    Args:
        axis: its name.
        dim: that it would have sharded.
        reason: why it does not.
    """

    axis: str
    dim: int
    reason: str


class Resolution(NamedTuple):
    """What `resolve` returns.

    Args:
        spec: the axes that shard each dim, all on the mesh and larger than one.
        dropped: the others.
    """

    spec: PartitionSpec
    dropped: tuple[DroppedAxis, ...]


def logical_to_mesh_axes(names: Sequence[str | None], rules: LogicalRules, *, strict: bool = False) -> PartitionSpec:
    """Find the mesh axes of each dim by its logical name.

        for (name, axes) in rules, in order:
            spec[dim of name] = axes, unless that dim has its axes already or one of `axes` is taken

    A rule applies whole or not at all; a rule without axes decides its dim too. All other dims are not sharded. Sizes
    of axes and dims are not considered: see `resolve`.

    Args:
        names: one per dim, None for a dim that is never sharded.
        rules: the table.
        strict: a name without a rule is an error; otherwise its dim is not sharded and a warning says so.

    Returns:
        one entry per dim.

    Raises:
        ValueError: for a name that is there twice and, if strict, for one without a rule, with the nearest that have.

    Source: `flax.linen.logical_to_mesh_axes`.
    """
    dims: dict[str, int] = {}
    for dim, name in enumerate(names):
        if name is not None and dims.setdefault(name, dim) != dim:
            raise ValueError(f"logical name {name!r} is that of dim {dims[name]} and of dim {dim}: {tuple(names)}")
    _report_unknown(names, rules, strict)
    spec: dict[str | None, tuple[str, ...]] = {}
    taken: set[str] = set()
    for logical, axes in rules:
        if logical in dims and logical not in spec and taken.isdisjoint(axes):
            spec[logical] = axes
            taken.update(axes)
    return PartitionSpec(*(spec.get(name) for name in names))


def _report_unknown(names: Sequence[str | None], rules: LogicalRules, strict: bool) -> None:
    known = dict.fromkeys(name for name, _ in rules)
    for name in names:
        if name is None or name in known:
            continue
        message = f"no rule for the logical name {name!r} of {tuple(names)}{nearest(name, known)}"
        if strict:
            raise ValueError(message)
        warnings.warn(f"{message}; its dim is not sharded", stacklevel=3)


def resolve(
    spec: PartitionSpec, mesh_sizes: Mapping[str, int], shape: Sequence[int], *, strict: bool = False
) -> Resolution:
    """Keep the axes of a spec that can shard a shape evenly on a mesh.

        shape[dim] % prod(sizes of its axes) == 0

    Absent axes and axes of size one are dropped alike. In a dim that does not divide, axes are taken in order as long
    as the product of their sizes divides it: DTensor loses rows of a dim that two axes shard unevenly.

    Args:
        spec: from `logical_to_mesh_axes`, or stated.
        mesh_sizes: the size of each mesh axis.
        shape: of the whole tensor.
        strict: a dim that does not divide is an error; otherwise axes are dropped.

    Returns:
        the spec without them, and each with its dim and the reason.

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
    """Return why `axis` cannot shard a dim of this length after the `major` axes, None if it can."""
    if axis not in mesh_sizes:
        return "the mesh has no such axis"
    if mesh_sizes[axis] == 1:
        return "its size is 1"
    sizes = [mesh_sizes[name] for name in (*major, axis)]
    if length % math.prod(sizes):
        return f"{length} is not divisible by {' * '.join(map(str, sizes))}"
    return None
