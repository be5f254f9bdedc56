"""Redistribution of tensors between shardings, with explicit collectives and explicit shardings of the gradients.

`redistribute` is for DTensors, and DTensor chooses the placements of their gradients. The functions on local tensors
take the shardings of the gradient as arguments, because DTensor cannot express two cases: an all-reduce whose backward
is the identity, and a gradient that stays partial over the axes that FSDP reduces later.
"""

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate

from maxmoe._torch import has_other_owner
from maxmoe.named_collectives import all_gather, all_reduce, reduce_scatter
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
        DTensor with the values of `tensor`, sharded by `sharding`; the backward restores the sharding of `tensor`.

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


@lru_cache(maxsize=1024)
def redistribution_steps(source: NamedSharding, target: NamedSharding) -> tuple[NamedSharding, ...]:
    """Return the shardings between `source` and `target`, each reached from the previous one over a single mesh axis.

    The last one is `target` without the axes over which `target` is partial and `source` is not. Cached, because every
    forward and backward asks for the same ones.
    """
    return tuple(_steps(source, target))


def _steps(source: NamedSharding, target: NamedSharding) -> Iterator[NamedSharding]:
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


class Redistribution(NamedTuple):
    """Shardings of a tensor before and after a redistribution, and of its gradient before and after the backward.

    Attributes:
        forward: sharding of the tensor, and of the result.
        backward: sharding of the gradient of the result, and of the gradient of the tensor.
    """

    forward: tuple[NamedSharding, NamedSharding]
    backward: tuple[NamedSharding, NamedSharding]

    @staticmethod
    @lru_cache(maxsize=256)
    def reduce_outputs(
        mesh: Mesh, num_dims: int, axes: tuple[str, ...], embed_axes: tuple[str, ...] = ()
    ) -> "Redistribution":
        """Sum partial outputs ``(..., D)`` over the ranks along `axes`, and shard the last dim over `embed_axes`.

        The collective is a reduce-scatter over an axis in both, an all-reduce over an axis in `axes` only, and a slice
        over an axis in `embed_axes` only. The backward all-gathers the gradient over `embed_axes`. It is the identity
        over other axes (g in Megatron-LM, arXiv:1909.08053, section 3): every rank along `axes` computes the same
        from the sum, so each already has the whole gradient of its summand. An all-reduce would count it once per rank.
        """
        whole = NamedSharding.replicated(mesh, num_dims)
        target = embed_sharding(mesh, num_dims, embed_axes) if embed_axes else whole
        return Redistribution((replace(whole, partial=axes), target), (target, whole))

    @staticmethod
    @lru_cache(maxsize=256)
    def reduce_gradient(
        mesh: Mesh, num_dims: int, axes: tuple[str, ...], left: tuple[str, ...] = ()
    ) -> "Redistribution":
        """Identity in the forward, all-reduce in the backward: f in Megatron-LM, section 3.

        For a replicated tensor from which every rank along `axes` computes a different part, so that each rank has a
        summand of its gradient. The gradient of the tensor is partial over the axes in `left`.
        """
        whole = NamedSharding.replicated(mesh, num_dims)
        return Redistribution((whole, whole), (replace(whole, partial=axes), replace(whole, partial=left)))


def embed_sharding(mesh: Mesh, num_dims: int, axes: tuple[str, ...]) -> NamedSharding:
    """Return the sharding of hidden states ``(..., D)`` whose last dim is sharded over `axes`."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * (num_dims - 1), axes))


@not_compiled
def redistribute_local(local: Tensor, redistribution: Redistribution, what: str) -> Tensor:
    """Redistribute a tensor, given this rank's shard and a name; return this rank's shard of the result."""
    result: Tensor = _RedistributeLocal.apply(local, redistribution, what)  # type: ignore[no-untyped-call]
    return result


def redistribute_parameter(parameter: DTensor, redistribution: Redistribution, name: str) -> Tensor:
    """Redistribute a DTensor parameter, and return this rank's shard as a plain tensor; its gradient is a DTensor."""
    result: Tensor = _RedistributeParameter.apply(parameter, redistribution, name)  # type: ignore[no-untyped-call]
    return result


class _RedistributeLocal(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, local: Tensor, redistribution: Redistribution, what: str) -> Tensor:
        context.redistribution, context.what = redistribution, what
        source, target = redistribution.forward
        return _redistributed(local, source, target, what)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        source, target = context.redistribution.backward
        return _redistributed(gradient, source, target, f"gradient of {context.what}"), None, None


class _RedistributeParameter(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, parameter: DTensor, redistribution: Redistribution, name: str) -> Tensor:
        context.redistribution, context.name = redistribution, name
        context.shape, context.stride = parameter.shape, parameter.stride()
        # detach, because without a collective the result is the local tensor itself, and autograd would attach this
        # Function to it.
        return _redistributed(parameter.to_local().detach(), *redistribution.forward, name)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> tuple[DTensor, None, None]:
        source, target = context.redistribution.backward
        is_shared = has_other_owner(gradient)
        grad_local = _redistributed(gradient, source, target, f"gradient of {context.name}").contiguous()
        # Without a collective, the gradient of a sum of parameters is one tensor for all of them. Autograd copies such
        # a tensor before it accumulates into it, but does not see it inside of a DTensor.
        if grad_local is gradient and is_shared:
            grad_local = gradient.clone()
        grad_parameter = DTensor.from_local(
            grad_local,
            target.mesh.device_mesh,
            target.placements,
            run_check=False,
            shape=context.shape,
            stride=context.stride,
        )
        return grad_parameter, None, None


def _redistributed(local: Tensor, source: NamedSharding, target: NamedSharding, what: str) -> Tensor:
    """Redistribute this rank's shard from `source` to `target`, without autograd."""
    if source == target:
        return local
    result, before = local, source
    for after in redistribution_steps(source, target):
        result = _over_one_axis(result, before, after, what)
        before = after
    summed = [axis for axis in target.partial if axis not in source.partial]
    if not summed:
        return result
    # A tensor becomes partial without communication: the first rank along the axis keeps the values, the others get
    # zeros. The values are cloned, because without a collective the result shares memory with the source.
    place = source.mesh.coordinates()
    return result.clone() if all(place[axis] == 0 for axis in summed) else torch.zeros_like(result)


def _over_one_axis(local: Tensor, source: NamedSharding, target: NamedSharding, what: str) -> Tensor:
    """Redistribute this rank's shard between two shardings that differ in one axis.

    Called on local tensors, because DTensor takes several times as long to choose the collective.
    """
    mesh, sharded_before, sharded_after = source.mesh, _sharded_dims(source), _sharded_dims(target)
    for axis in sharded_before.keys() - sharded_after.keys():
        return _all_gather(local, mesh, axis, sharded_before[axis], what)
    for axis in sharded_after.keys() - sharded_before.keys():
        if axis in source.partial:
            return _reduce_scatter(local, mesh, axis, sharded_after[axis], what)
        # Cloned, because the result of a Function must not be a view of its input.
        return local.chunk(mesh.size(axis), sharded_after[axis])[mesh.coordinates()[axis]].clone()
    (axis,) = set(source.partial) - set(target.partial)
    return _all_reduce(local, mesh, axis, what)


def _all_gather(local: Tensor, mesh: Mesh, axis: str, dim: int, what: str) -> Tensor:
    size = mesh.size(axis)
    if size == 1:
        return local
    gathered = local.new_empty(size * local.shape[0], *local.shape[1:])
    all_gather(gathered, local.contiguous(), what, group=mesh.process_group(axis))
    return gathered if dim == 0 else torch.cat(gathered.chunk(size), dim)


def _reduce_scatter(local: Tensor, mesh: Mesh, axis: str, dim: int, what: str) -> Tensor:
    size = mesh.size(axis)
    if size == 1:
        return local
    summands = local.contiguous() if dim == 0 else torch.cat(local.chunk(size, dim))
    reduced = summands.new_empty(summands.shape[0] // size, *summands.shape[1:])
    reduce_scatter(reduced, summands, what, group=mesh.process_group(axis))
    return reduced


def _all_reduce(local: Tensor, mesh: Mesh, axis: str, what: str) -> Tensor:
    if mesh.size(axis) == 1:
        return local
    total = local.clone(memory_format=torch.contiguous_format)
    all_reduce(total, what, group=mesh.process_group(axis))
    return total


def _sharded_dims(sharding: NamedSharding) -> dict[str, int]:
    return {axis: dim for dim, axes in enumerate(sharding.spec) for axis in axes}


def _with_axes(spec: PartitionSpec, dim: int, axes: tuple[str, ...]) -> PartitionSpec:
    return PartitionSpec(*spec[:dim], axes, *spec[dim + 1 :])


def _without(axes: tuple[str, ...], axis: str) -> tuple[str, ...]:
    return tuple(other for other in axes if other != axis)
