"""Redistribution of tensors between shardings, with explicit collectives and explicit shardings of the gradients.

`redistribute` is for DTensors, and DTensor chooses the placements of their gradients. The functions on local tensors
take the shardings of the gradient as arguments, because DTensor cannot express two cases: an all-reduce whose backward
is the identity, and a gradient that stays partial over the axes that FSDP reduces later.
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
    """Redistribute a tensor by all-gathers, reductions, all-to-alls and slices.

    Args:
        tensor: DTensor on the mesh, which may be partial; or a plain tensor, replicated on every rank.
        sharding: sharding of the result.

    Returns:
        DTensor with the values of `tensor`, sharded by `sharding`; the backward redistributes its gradient back.

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
    """Yield the shardings between `source` and `target`, each reached from the previous one over a single mesh axis.

    The last one is `target`, except that it is not partial over axes over which only `target` is partial.
    """
    # All-gathers, the minor axis of a dim first: only the last axis of a dim can be gathered without strided shards.
    sharding = source
    for dim, axes in enumerate(target.spec):
        while sharding.spec[dim] != axes[: len(sharding.spec[dim])]:
            sharding = replace(sharding, spec=_with_axes(sharding.spec, dim, sharding.spec[dim][:-1]))
            yield sharding
    # A reduce-scatter for an axis that is partial in the source, a slice for any other axis of the target.
    for dim, axes in enumerate(target.spec):
        for axis in axes[len(sharding.spec[dim]) :]:
            spec = _with_axes(sharding.spec, dim, (*sharding.spec[dim], axis))
            sharding = replace(sharding, spec=spec, partial=_without(sharding.partial, axis))
            yield sharding
    # All-reduces come last, on the smallest shards.
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
    """Redistribute a tensor, given as this rank's shard, from `source` to `target`.

    In the backward, the gradient of the result has the sharding `grad_source` and is redistributed to `grad_target`.
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
    """Redistribute a DTensor parameter from `source` to `target` and return this rank's shard as a plain tensor.

    In the backward, the gradient of the result has the sharding `grad_source` and is redistributed to `grad_target`, as
    a DTensor.
    """
    result: Tensor = _RedistributeParameter.apply(parameter, source, target, grad_source, grad_target)  # type: ignore[no-untyped-call]
    return result


@not_compiled
def all_reduce(local: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    """All-reduce in the forward, identity in the backward: g in Megatron-LM (arXiv:1909.08053) section 3.

    For sums from which every rank along `axes` computes the same result: each rank already has the whole gradient of
    the sum, which is the gradient of its own summand. An all-reduce in the backward would count it once per rank.
    """
    partial, whole = summed(mesh, local.dim(), axes)
    return redistribute_local(local, partial, whole, grad_source=whole, grad_target=whole)


@not_compiled
def reduce_outputs(outputs: Tensor, mesh: Mesh, axes: tuple[str, ...], embed_axes: tuple[str, ...] = ()) -> Tensor:
    """Sum partial outputs ``(..., D)`` over the ranks along `axes`, and shard the last dim over `embed_axes`.

    The collective is a reduce-scatter over an axis in both, an all-reduce over an axis in `axes` only, and a slice over
    an axis in `embed_axes` only. The backward all-gathers the gradient over `embed_axes`, so that every rank has the
    whole gradient of its outputs.
    """
    partial, whole = summed(mesh, outputs.dim(), axes)
    target = embed_sharding(mesh, outputs.dim(), embed_axes)
    return redistribute_local(outputs, partial, target, grad_source=target, grad_target=whole)


def embed_sharding(mesh: Mesh, num_dims: int, axes: tuple[str, ...]) -> NamedSharding:
    """Return the sharding of hidden states ``(..., D)`` whose last dim is sharded over `axes`."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * (num_dims - 1), axes))


@not_compiled
def all_reduce_gradient(local: Tensor, mesh: Mesh, axes: tuple[str, ...]) -> Tensor:
    """Identity in the forward, all-reduce in the backward: f in Megatron-LM (arXiv:1909.08053) section 3.

    For a replicated tensor from which every rank along `axes` computes a different part: each rank then has a summand
    of its gradient.
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
        # detach, because without a collective the result is the local tensor itself, and autograd would attach this
        # Function to it.
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
    """Redistribute this rank's shard from `source` to `target`, without autograd."""
    if source == target:
        return local
    device_mesh = source.mesh.device_mesh
    tensor = DTensor.from_local(local.contiguous(), device_mesh, source.placements, run_check=False)
    # One axis at a time, because DTensor chooses the collectives of a redistribution over several axes by itself, and
    # planning counts the collectives of `redistribution_steps`.
    for sharding in redistribution_steps(source, target):
        tensor = tensor.redistribute(placements=sharding.placements)
    result = waited(tensor.to_local())
    summed = [axis for axis in target.partial if axis not in source.partial]
    if not summed:
        return result
    # A tensor becomes partial without communication: the first rank along the axis keeps the values, the others get
    # zeros. The values are cloned, because without a collective the result shares memory with the source.
    place = source.mesh.coordinates()
    return result.clone() if all(place[axis] == 0 for axis in summed) else torch.zeros_like(result)


def _with_axes(spec: PartitionSpec, dim: int, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*spec[:dim], axes, *spec[dim + 1 :])


def _without(axes: tuple[str, ...], axis: str) -> tuple[str, ...]:
    return tuple(other for other in axes if other != axis)
