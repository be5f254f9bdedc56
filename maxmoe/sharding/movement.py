"""Differentiable moves between layouts, with the layouts of the gradients stated.

DTensor derives where a gradient lies from where its value lies. That leaves out a sum over ranks whose gradient every
rank keeps for itself, and a gradient that is left for FSDP to reduce.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Partial, Placement

from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.partition_spec import PartitionSpec


@dataclass(frozen=True)
class Layout:
    """How a tensor lies on a mesh: sharded, and perhaps a sum that nobody has taken yet.

    Args:
        spec: the axes of each dim.
        sums: axes over which every rank has a summand.
    """

    spec: PartitionSpec
    sums: tuple[str, ...] = ()

    def placements(self, mesh: Mesh) -> tuple[Placement, ...]:
        """Write it down for DTensor."""
        placements = NamedSharding(mesh, self.spec).placements
        if not mesh.axes:
            return placements
        return tuple(
            Partial() if axis in self.sums else placement for axis, placement in zip(mesh.axes, placements, strict=True)
        )


class Move(NamedTuple):
    """From which layout to which."""

    source: Layout
    target: Layout

    def steps(self, mesh: Mesh) -> Iterator[Layout]:
        """Yield the layouts on the way, each after one collective over one axis.

        Gathers come first, the minor axis of a dim before the major ones, then sums and slices in the order of the
        target: a sum over an axis that shards the target is a reduce-scatter.
        """
        layout = self.source
        for dim, target in enumerate(self.target.spec):
            while layout.spec[dim] != target[: len(layout.spec[dim])]:
                layout = replace(layout, spec=_with_axes(layout.spec, dim, layout.spec[dim][:-1]))
                yield layout
        for dim, target in enumerate(self.target.spec):
            for axis in target[len(layout.spec[dim]) :]:
                spec = _with_axes(layout.spec, dim, (*layout.spec[dim], axis))
                layout = Layout(spec, tuple(other for other in layout.sums if other != axis))
                yield layout
        for axis in layout.sums:
            if axis not in self.target.sums:
                layout = replace(layout, sums=tuple(other for other in layout.sums if other != axis))
                yield layout


def stay(num_dims: int) -> Move:
    """Leave a tensor whole, as every rank has it."""
    whole = Layout(PartitionSpec(*(None,) * num_dims))
    return Move(whole, whole)


def take_sum(num_dims: int, axes: tuple[str, ...]) -> Move:
    """Sum tensors over axes; every rank gets the sum."""
    whole = Layout(PartitionSpec(*(None,) * num_dims))
    return Move(replace(whole, sums=axes), whole)


def _with_axes(spec: PartitionSpec, dim: int, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*spec[:dim], axes, *spec[dim + 1 :])


def _moved(local: Tensor, mesh: Mesh, move: Move) -> Tensor:
    """Return this rank's part after a move, given its part before."""
    if move.source == move.target:
        return local
    tensor = DTensor.from_local(local.contiguous(), mesh.device_mesh, move.source.placements(mesh), run_check=False)
    for layout in move.steps(mesh):
        tensor = tensor.redistribute(placements=layout.placements(mesh))
    result = tensor.to_local()
    return result.wait() if isinstance(result, AsyncCollectiveTensor) else result


class _MoveTensor(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, local: Tensor, mesh: Mesh, value: Move, gradient: Move) -> Tensor:
        context.mesh, context.gradient = mesh, gradient
        return _moved(local, mesh, value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return _moved(gradient, context.mesh, context.gradient), None, None, None


class _GatherParameter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, parameter: DTensor, mesh: Mesh, value: Move, gradient: Move) -> Tensor:
        context.mesh, context.gradient = mesh, gradient
        context.shape, context.stride = parameter.shape, parameter.stride()
        return _moved(parameter.to_local(), mesh, value)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[DTensor, None, None, None]:
        mesh, move = context.mesh, context.gradient
        whole = DTensor.from_local(
            _moved(gradient, mesh, move).contiguous(),
            mesh.device_mesh,
            move.target.placements(mesh),
            run_check=False,
            shape=context.shape,
            stride=context.stride,
        )
        return whole, None, None, None


def move(local: Tensor, mesh: Mesh, value: Move, gradient: Move) -> Tensor:
    """Move a tensor of which each rank has its part.

    Args:
        local: this rank's part.
        mesh: of the ranks.
        value: the move.
        gradient: the move of the gradient of the result, on its way back.

    Returns:
        This rank's part after the move.
    """
    moved: Tensor = _MoveTensor.apply(local, mesh, value, gradient)  # type: ignore[no-untyped-call]
    return moved


def gather_parameter(parameter: DTensor, mesh: Mesh, value: Move, gradient: Move) -> Tensor:
    """Move a parameter to where it is used.

    Args:
        parameter: a DTensor on the mesh.
        mesh: of the ranks.
        value: the move, from where the parameter is stored.
        gradient: the move of its gradient, on its way back.

    Returns:
        This rank's part, a plain tensor.
    """
    gathered: Tensor = _GatherParameter.apply(parameter, mesh, value, gradient)  # type: ignore[no-untyped-call]
    return gathered
