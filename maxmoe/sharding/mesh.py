"""Device mesh with named axes."""

import math
import re
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from maxmoe.ranks.agreement import check_ranks_agree

TIMEOUT = timedelta(minutes=10)
# Axis over which `maxmoe.pipeline` cuts the blocks of a model. Its ranks run different modules on the same tokens.
STAGE_AXIS = "stage"

Layout: TypeAlias = tuple[tuple[str, int], ...]  # axes and sizes of a `DeviceMesh`


class Mesh:
    """Grid of ranks with named axes, the first axis outermost.

        rank = ((coordinate_0 * size_1) + coordinate_1) * size_2 + ...

    An axis of size one and an absent axis are equivalent: `size` returns 1, and `device_mesh` has neither.

    Args:
        sizes: number of ranks along each axis. One size may be -1: it is inferred from the world size.
        device_type: device type of the process groups, "cpu" or "cuda".
        timeout: timeout of every collective on the mesh. The process groups of a `DeviceMesh` ignore the timeout given
            to `init_process_group` and would have torch's default of 30 minutes.

    Attributes:
        sizes: number of ranks along each axis.
        rank: rank of this process in the mesh; None on a planned mesh.
        timeout: timeout of every collective on the mesh.

    Raises:
        ValueError: on every rank, if the product of the sizes is not the world size, the sizes differ between ranks,
            or torch.distributed is not initialised.

    Source: `jax.sharding.Mesh`; https://github.com/pytorch/pytorch/issues/119613
    """

    rank: int | None = None
    timeout: timedelta = TIMEOUT
    _whole: "Mesh | None" = None  # of all stages
    _device_mesh: DeviceMesh | None = None

    def __init__(self, sizes: Mapping[str, int], *, device_type: str = "cpu", timeout: timedelta = TIMEOUT) -> None:
        if not dist.is_initialized():
            raise ValueError(
                f"Mesh({sizes}) needs torch.distributed: call torch.distributed.init_process_group first, "
                "in processes that torchrun started; Mesh.planned needs none"
            )
        check_ranks_agree({"the sizes of the mesh": str(sizes)}, device_type)
        self.sizes = filled(sizes, dist.get_world_size())
        self.rank, self.timeout = dist.get_rank(), timeout
        self._device_mesh = _device_mesh(dist.group.WORLD, device_type, self._layout, timeout)

    @classmethod
    def planned(cls, sizes: Mapping[str, int], *, world_size: int | None = None) -> "Mesh":
        """Make a mesh without processes, for planning.

        Args:
            sizes: number of ranks along each axis. One size may be -1 if `world_size` is given.
            world_size: number of ranks; None for the product of the sizes.

        Raises:
            ValueError: if the product of the sizes is not `world_size`.
        """
        mesh = cls.__new__(cls)
        mesh.sizes = filled(sizes, world_size)
        return mesh

    def within_stage(self) -> "Mesh":
        """Return the mesh of the ranks of this rank's stage: those that differ from it on other axes than `stage`.

        Ranks, coordinates and sizes of the returned mesh are within the stage. It shares the process groups of this
        mesh. Without an axis `stage`, or with one of size one, all ranks are in one stage.
        """
        mesh = Mesh.planned({axis: size for axis, size in self.sizes.items() if axis != STAGE_AXIS})
        if self._device_mesh is not None:
            place = self.coordinates()
            mesh.rank = 0
            for axis, size in mesh.sizes.items():
                mesh.rank = mesh.rank * size + place[axis]
            mesh._whole, mesh.timeout = self, self.timeout
            names = tuple(axis for axis, _ in self._layout if axis != STAGE_AXIS)
            mesh._device_mesh = _sub_mesh(dist.group.WORLD, self._device_mesh, names)
        return mesh

    @property
    def stage(self) -> int:
        """Coordinate of this rank on the axis `stage`, also on the mesh within its stage; 0 without such an axis."""
        return (self._whole or self).coordinates().get(STAGE_AXIS, 0)

    @property
    def device_mesh(self) -> DeviceMesh:
        """`DeviceMesh` of the axes larger than one; it has one axis of size one if there are none."""
        if self._device_mesh is None:
            raise ValueError(f"{self} is planned only: it has no process groups")
        return self._device_mesh

    @property
    def device_type(self) -> str:
        """Device type of the process groups; "cpu" for a planned mesh."""
        return "cpu" if self._device_mesh is None else self._device_mesh.device_type

    @property
    def axes(self) -> tuple[str, ...]:
        """Names of the axes larger than one, in order."""
        return tuple(axis for axis, size in self.sizes.items() if size > 1)

    @property
    def _layout(self) -> Layout:
        """Axes and sizes of `device_mesh`; an axis of size one if there is no other one within a stage."""
        layout = {axis: self.sizes[axis] for axis in self.axes}
        if not layout.keys() - {STAGE_AXIS}:
            layout[next((axis for axis in self.sizes if axis != STAGE_AXIS), "world")] = 1
        return tuple(layout.items())

    @property
    def num_ranks(self) -> int:
        """Number of ranks: the product of the sizes."""
        return math.prod(self.sizes.values())

    def size(self, *axes: str) -> int:
        """Return the product of the sizes of `axes`; an absent axis counts 1."""
        return math.prod([self.sizes[axis] for axis in axes if axis in self.sizes])

    def coordinates(self, rank: int | None = None) -> dict[str, int]:
        """Return the coordinates of a rank on all axes; None for the rank of this process.

        Raises:
            ValueError: for a rank that the mesh does not have, and for None on a planned mesh.
        """
        rank = self.rank if rank is None else rank
        if rank is None:
            raise ValueError(f"rank must be given on the planned {self}, got None")
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank must be from 0 to {self.num_ranks - 1} on {self}, got {rank}")
        place = {}
        for axis, size in reversed(self.sizes.items()):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.sizes}

    def ranks_along(self, *axes: str) -> tuple[int, ...]:
        """Return the ranks of the mesh that differ from this rank on `axes` only, in ascending order."""
        place = {axis: at for axis, at in self.coordinates().items() if axis not in axes}
        ranks = range(self.num_ranks)
        return tuple(rank for rank in ranks if place.items() <= self.coordinates(rank).items())

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """Return this rank's sub-mesh of some axes larger than one, in the order of the mesh."""
        wanted = (axes,) if isinstance(axes, str) else axes
        if not wanted or not {*wanted} <= {*self.axes}:
            raise ValueError(f"{self} has no sub-mesh of {wanted}: its axes larger than one are {self.axes}")
        return self.device_mesh[tuple(axis for axis in self.axes if axis in wanted)]

    def process_group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this rank on `axes` only, in ascending order.

        The axes must be larger than one. A group over several axes is made at the first call, which is collective: all
        its ranks must ask for it.
        """
        if len(axes) == 1 and axes[0] in self.axes:
            return self.device_mesh.get_group(axes[0])
        names = self[axes].mesh_dim_names  # raises for unknown axes
        return _joint_group(dist.group.WORLD, (self._whole or self)._layout, names, self.timeout)

    def __deepcopy__(self, _memo: object) -> "Mesh":
        """Return the mesh itself: process groups cannot be copied, so copies of a model share them."""
        return self

    def __reduce__(self) -> Any:
        if self._device_mesh is not None:
            raise TypeError(
                f"{self} has process groups, which cannot be saved, nor can a parallelized module: save its state_dict "
                "with torch.distributed.checkpoint, and load it into a module that has been parallelized on any mesh"
            )
        return super().__reduce__()

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in self.sizes.items())})"


@cache
def _device_mesh(_world: dist.ProcessGroup | None, device_type: str, layout: Layout, timeout: timedelta) -> DeviceMesh:
    """Make the process groups of a mesh.

    Cached, because DTensor compares meshes by value but collectives need the same group objects. The default group is
    an argument, so that a new `init_process_group` makes new groups.
    """
    groups = []
    for axis, _ in layout:
        members = _groups_along(layout, (axis,))
        groups.append(dist.new_subgroups_by_enumeration(members, timeout=timeout)[0])  # type: ignore[no-untyped-call]
    ranks = torch.arange(math.prod(dict(layout).values())).view(*dict(layout).values())
    return DeviceMesh.from_group(groups, device_type, ranks, mesh_dim_names=tuple(dict(layout)))


@cache
def _sub_mesh(_world: dist.ProcessGroup | None, device_mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    """Return the part of a mesh with some of its axes; cached, because FSDP2 compares meshes by identity."""
    return device_mesh[axes]


@cache
def _joint_group(
    _world: dist.ProcessGroup | None, layout: Layout, axes: tuple[str, ...], timeout: timedelta
) -> dist.ProcessGroup:
    """Make the process group over several axes.

    `DeviceMesh._flatten` would register the flattened mesh, and DTensor then gathers uneven dims wrongly
    (https://github.com/pytorch/pytorch/issues/194457).
    """
    members = next(members for members in _groups_along(layout, axes) if dist.get_rank() in members)
    # Only the members create the group: the ranks of another stage, with other modules, may never ask for theirs.
    group: dist.ProcessGroup = dist.new_group(members, timeout=timeout, use_local_synchronization=True)
    return group


def _groups_along(layout: Layout, axes: tuple[str, ...]) -> list[list[int]]:
    """Group the ranks of a mesh that differ on some axes only."""
    ranks = torch.arange(math.prod(dict(layout).values())).view(*dict(layout).values())
    dims = [dim for dim, (axis, _) in enumerate(layout) if axis in axes]
    size = math.prod(size for axis, size in layout if axis in axes)
    groups: list[list[int]] = ranks.movedim(dims, [*range(-len(dims), 0)]).reshape(-1, size).tolist()
    return groups


def filled(sizes: Mapping[str, int], world_size: int | None) -> dict[str, int]:
    """Check the sizes of a mesh and infer the size that is -1."""
    if not isinstance(sizes, Mapping):
        raise TypeError(f"the sizes of a mesh must be by axis, as {{'expert': 2}}, got {sizes!r}")
    for axis, size in sizes.items():
        if not axis or not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(f"the size of the mesh axis {axis!r} must be a positive int or -1, got {size!r}")
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ValueError(f"only one mesh axis may be -1, got {open_axes}")
    text = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    known = math.prod(size for size in sizes.values() if size != -1)
    if not open_axes and world_size not in (None, known):
        raise ValueError(f"the mesh axes ({text}) make {known} ranks, and the world has {world_size}")
    if not open_axes:
        return dict(sizes)
    if world_size is None:
        raise ValueError(f"world_size must be given for a mesh with a -1: {text}")
    if world_size % known:
        raise ValueError(f"the mesh axes ({text}) do not divide the world of {world_size}")
    return {axis: world_size // known if size == -1 else size for axis, size in sizes.items()}


def parse_mesh(text: str) -> dict[str, int]:
    """Parse the sizes of a mesh from a string such as "fsdp=2,expert=-1"; empty for a mesh without axes.

    Raises:
        ValueError: for text of another form, and for a repeated axis.
    """
    sizes: dict[str, int] = {}
    for part in filter(None, text.split(",")):
        axis, _, size = part.partition("=")
        if not axis.isidentifier() or not re.fullmatch("-?[0-9]{1,9}", size):
            raise ValueError(f"a mesh must read like fsdp=2,expert=4, got {part!r} in {text!r}")
        if axis in sizes:
            raise ValueError(f"the mesh axis {axis!r} is there twice: {text!r}")
        sizes[axis] = int(size)
    return sizes
