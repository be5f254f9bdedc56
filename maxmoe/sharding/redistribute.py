"""From one sharding to another, with the collectives and the shardings of the gradients stated.

`redistribute` is for DTensors, whose gradients DTensor places by itself. The functions on local tensors take the
shardings of the gradient as arguments: DTensor cannot express a sum over ranks whose gradient every rank keeps for
itself, nor a gradient that stays partial over the axes that FSDP reduces later.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate

from maxmoe._torch import waited
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding
from maxmoe.sharding.not_compiled import not_compiled
from maxmoe.sharding.partition_spec import PartitionSpec


def redistribute(tensor: Tensor, sharding: NamedSharding) -> DTensor:
    """Redistribute a tensor, by whatever all-gathers, reductions, all-to-alls or slices it takes.

    Args:
        tensor: a DTensor on the mesh, partial ones included; or a plain tensor, replicated on every rank.
        sharding: the result's.

    Returns:
        The same tensor with that sharding; gradients are redistributed back.

    Raises:
        ValueError: for a DTensor on another mesh, and as `NamedSharding.shard_shape`.

    Source: `torch.distributed.tensor.DTensor.redistribute`; `jax.sharding.reshard`.
    """
    sharding.shard_shape(tensor.shape)
    device_mesh = sharding.mesh.device_mesh
    if not isinstance(tensor, DTensor):
        tensor = DTensor.from_local(tensor, device_mesh, [Replicate()] * device_mesh.ndim, run_check=False)
    if tensor.device_mesh != device_mesh:
        raise ValueError(f"the tensor is on {tensor.device_mesh}, the sharding on {device_mesh}")
    return tensor.redistribute(placements=sharding.placements)


def redistribution_steps(source: NamedSharding, target: NamedSharding) -> Iterator[NamedSharding]:
    """List the shardings from `source` to `target`, each one collective over one axis after the one before.

    All-gathers come first, the minor axis of a dim before the major ones. Then come the axes of the target in their
    order: a reduce-scatter over an axis that is partial in the source, a slice over any other. All-reduces come last.
    To become partial takes no step: the first rank along the axis keeps the values, the others have zeros.

    Args:
        source: before.
        target: after, on the same mesh.

    Yields:
        Every sharding after `source`; the last one is `target`, but for axes over which it becomes partial.
    """
    sharding = source
    for dim, axes in enumerate(target.spec):
        while sharding.spec[dim] != axes[: len(sharding.spec[dim])]:
            sharding = replace(sharding, spec=_with_axes(sharding.spec, dim, sharding.spec[dim][:-1]))
            yield sharding
    for dim, axes in enumerate(target.spec):
        for axis in axes[len(sharding.spec[dim]) :]:
            spec = _with_axes(sharding.spec, dim, (*sharding.spec[dim], axis))
            sharding = replace(sharding, spec=spec, partial=_without(sharding.partial, axis))
            yield sharding
    for axis in sharding.partial:
        if axis not in target.partial:
            sharding = replace(sharding, partial=_without(sharding.partial, axis))
            yield sharding


@not_compiled
def redistribute_local(
    local: Tensor,
    source: NamedSharding,
    target: NamedSharding,
    *,
    grad_source: NamedSharding,
    grad_target: NamedSharding,
) -> Tensor:
    """Redistribute a tensor given as this rank's part.

    Args:
        local: this rank's part.
        source: of the tensor.
        target: of the result.
        grad_source: of the gradient of the result, as the backward finds it.
        grad_target: of the gradient of the tensor, as the backward leaves it.

    Returns:
        This rank's part of the result.
    """
    result: Tensor = _RedistributeLocal.apply(local, source, target, grad_source, grad_target)  # type: ignore[no-untyped-call]
    return result


def redistribute_parameter(
    parameter: DTensor,
    source: NamedSharding,
    target: NamedSharding,
    *,
    grad_source: NamedSharding,
    grad_target: NamedSharding,
) -> Tensor:
    """Redistribute a parameter to where it is used.

    Args:
        parameter: a DTensor.
        source: of the parameter.
        target: of the result.
        grad_source: of the gradient of the result, as the backward finds it.
        grad_target: of the gradient of the parameter, a DTensor, as the backward leaves it.

    Returns:
        This rank's part of the result, a plain tensor.
    """
    result: Tensor = _RedistributeParameter.apply(parameter, source, target, grad_source, grad_target)  # type: ignore[no-untyped-call]
    return result


@not_compiled
def all_reduce(local: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    """Sum over the ranks along axes; the gradient of a summand is the gradient of the sum.

    Right where every rank goes on with the sum and computes the same from it: each backpropagates to its own summand.

    Args:
        local: this rank's summand, of the same shape on every rank.
        mesh: of the ranks.
        axes: of the mesh.

    Returns:
        The sum, the same on every rank along `axes`.

    Source: g in Megatron-LM (arXiv:1909.08053) section 3.
    """
    partial, whole = summed(mesh, local.dim(), axes)
    return redistribute_local(local, partial, whole, grad_source=whole, grad_target=whole)


@not_compiled
def reduce_outputs(outputs: Tensor, mesh: Mesh, axes: tuple[str, ...], embed_axes: tuple[str, ...] = ()) -> Tensor:
    """Sum outputs over the ranks along `axes`, and keep this rank's part of the last dim along `embed_axes`.

    An axis in both takes a reduce-scatter, one in `axes` alone an all-reduce, one in `embed_axes` alone a slice. The
    gradient of the outputs is whole on every rank.

    Args:
        outputs: ``(..., D)``, this rank's summand.
        mesh: of the ranks.
        axes: over which the outputs are partial sums.
        embed_axes: that shard the last dim of the result.

    Returns:
        ``(..., D / ranks along embed_axes)``.
    """
    partial, whole = summed(mesh, outputs.dim(), axes)
    target = embed_sharding(mesh, outputs.dim(), embed_axes)
    return redistribute_local(outputs, partial, target, grad_source=target, grad_target=whole)


def embed_sharding(mesh: Mesh, num_dims: int, axes: tuple[str, ...]) -> NamedSharding:
    """Return the sharding of hidden states ``(..., D)`` whose last dim is sharded over `axes`."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * (num_dims - 1), axes))


@not_compiled
def all_reduce_gradient(local: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    """Return a tensor unchanged; its gradient is summed over the ranks along axes.

    Right where every rank has the same tensor and computes something else from it.

    Args:
        local: the same on every rank along `axes`.
        mesh: of the ranks.
        axes: of the mesh.

    Returns:
        The tensor.

    Source: f in Megatron-LM (arXiv:1909.08053) section 3.
    """
    partial, whole = summed(mesh, local.dim(), axes)
    return redistribute_local(local, whole, whole, grad_source=partial, grad_target=whole)


def summed(mesh: Mesh, num_dims: int, axes: tuple[str, ...]) -> tuple[NamedSharding, NamedSharding]:
    """Return the shardings before and after the all-reduce over `axes` of a tensor that no axis shards."""
    return NamedSharding.replicated(mesh, num_dims, partial=axes), NamedSharding.replicated(mesh, num_dims)


class _RedistributeLocal(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        local: Tensor,
        source: NamedSharding,
        target: NamedSharding,
        grad_source: NamedSharding,
        grad_target: NamedSharding,
    ) -> Tensor:
        context.shardings = grad_source, grad_target
        return _redistributed(local, source, target)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _redistributed(gradient, *context.shardings), None, None, None, None


class _RedistributeParameter(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        parameter: DTensor,
        source: NamedSharding,
        target: NamedSharding,
        grad_source: NamedSharding,
        grad_target: NamedSharding,
    ) -> Tensor:
        context.shardings = grad_source, grad_target
        context.shape, context.stride = parameter.shape, parameter.stride()
        # detach: where nothing moves, the result is the local tensor, and autograd would make that part of the graph.
        return _redistributed(parameter.to_local().detach(), source, target)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[DTensor, None, None, None, None]:
        grad_source, grad_target = context.shardings
        grad_parameter = DTensor.from_local(
            _redistributed(gradient, grad_source, grad_target).contiguous(),
            grad_target.mesh.device_mesh,
            grad_target.placements,
            run_check=False,
            shape=context.shape,
            stride=context.stride,
        )
        return grad_parameter, None, None, None, None


def _redistributed(local: Tensor, source: NamedSharding, target: NamedSharding) -> Tensor:
    """Return this rank's part of the tensor in the target, given its part in the source."""
    if source == target:
        return local
    device_mesh = source.mesh.device_mesh
    tensor = DTensor.from_local(local.contiguous(), device_mesh, source.placements, run_check=False)
    # Step by step: DTensor chooses the collectives of a redistribution over several axes by itself, and planning
    # counts those of `redistribution_steps`.
    for sharding in redistribution_steps(source, target):
        tensor = tensor.redistribute(placements=sharding.placements)
    result = waited(tensor.to_local())
    summed = [axis for axis in target.partial if axis not in source.partial]
    if not summed:
        return result
    place = source.mesh.coordinates()
    # A copy: where no collective has made one, the result would share the memory of the source.
    return result.clone() if all(place[axis] == 0 for axis in summed) else torch.zeros_like(result)


def _with_axes(spec: PartitionSpec, dim: int, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*spec[:dim], axes, *spec[dim + 1 :])


def _without(axes: tuple[str, ...], axis: str) -> tuple[str, ...]:
    return tuple(other for other in axes if other != axis)
