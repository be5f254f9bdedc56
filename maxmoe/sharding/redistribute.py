"""Redistribution of tensors between shardings, with explicit collectives and explicit shardings of the gradients.

`redistribute` is for DTensors, and DTensor chooses the placements of their gradients. The functions on local tensors
take the shardings of the gradient as arguments, because DTensor cannot express two cases: an all-reduce whose backward
is the identity, and a gradient that stays partial over the axes that FSDP reduces later.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Replicate

from maxmoe._torch import has_other_owner, never_compiled
from maxmoe.ranks.named_collectives import all_gather, all_reduce, reduce_scatter
from maxmoe.sharding.mesh import Mesh
from maxmoe.sharding.named_sharding import NamedSharding, PartitionSpec


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


class Step(NamedTuple):
    """One step of a redistribution, over one axis, or an all-reduce over several ones. A slice needs no collective."""

    kind: Literal["all-gather", "reduce-scatter", "all-reduce", "slice"]
    axes: tuple[str, ...]
    dim: int  # which is gathered, scattered or sliced; 0 for an all-reduce
    before: NamedSharding
    after: NamedSharding


@lru_cache(maxsize=1024)
def redistribution_steps(source: NamedSharding, target: NamedSharding) -> tuple[Step, ...]:
    """Return the steps from `source` to `target`, each over a single mesh axis.

    The last one ends at `target` without the axes over which `target` is partial and `source` is not. Cached, because
    every forward and backward asks for the same ones.
    """
    steps: list[Step] = []
    before = source
    # All-gathers, the minor axis of a dim first: only the last axis of a dim can be gathered without strided shards.
    for dim, axes in enumerate(target.spec):
        while before.spec[dim] != axes[: len(before.spec[dim])]:
            axis = before.spec[dim][-1]
            steps.append(Step("all-gather", (axis,), dim, before, before.without(axis)))
            before = steps[-1].after
    # A reduce-scatter for an axis that is partial in the source, a slice for any other axis of the target.
    for dim, axes in enumerate(target.spec):
        for axis in axes[len(before.spec[dim]) :]:
            spec = PartitionSpec(*before.spec[:dim], (*before.spec[dim], axis), *before.spec[dim + 1 :])
            after = replace(before, spec=spec, partial=tuple(other for other in before.partial if other != axis))
            steps.append(Step("reduce-scatter" if axis in before.partial else "slice", (axis,), dim, before, after))
            before = after
    # All-reduces come last, on the smallest shards.
    for axis in before.partial:
        if axis not in target.partial:
            after = replace(before, partial=tuple(other for other in before.partial if other != axis))
            steps.append(Step("all-reduce", (axis,), 0, before, after))
            before = after
    return tuple(steps)


@lru_cache(maxsize=1024)
def joint_steps(
    redistributions: tuple[tuple[NamedSharding, NamedSharding], ...],
) -> tuple[tuple[tuple[int, Step], ...], ...]:
    """Return the steps of several tensors, each from one sharding to another, in the order in which they are run.

    Those that run together are in one tuple, each with the index of its tensor: reduce-scatters over the same axis, and
    all-reduces over the same axes, which come last. An all-reduce is over all axes at once.
    """
    todo: list[list[Step]] = []
    for source, target in redistributions:
        steps = redistribution_steps(source, target)
        sums = [step for step in steps if step.kind == "all-reduce"]
        todo.append([*steps[: len(steps) - len(sums)]])
        if sums:
            axes = tuple(axis for axis in source.mesh.sizes if (axis,) in [step.axes for step in sums])
            todo[-1].append(Step("all-reduce", axes, 0, sums[0].before, sums[-1].after))
    joint = []
    while following := {index: steps[0] for index, steps in enumerate(todo) if steps}:
        first = min(following, key=lambda index: following[index].kind == "all-reduce")
        together = [index for index, step in following.items() if step[:2] == following[first][:2]]
        taken = together if following[first].kind in ("reduce-scatter", "all-reduce") else [first]
        joint.append(tuple((index, todo[index].pop(0)) for index in taken))
    return tuple(joint)


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


@never_compiled
def redistribute_local(local: Tensor, redistribution: Redistribution, what: str) -> Tensor:
    """Redistribute a tensor, given this rank's shard and a name; return this rank's shard of the result."""
    result: Tensor = _RedistributeLocal.apply(local, redistribution, what)  # type: ignore[no-untyped-call]
    return result


def redistribute_parameters(
    parameters: Sequence[tuple[DTensor, Redistribution, str]], *, jointly: bool
) -> list[Tensor]:
    """Redistribute named DTensor parameters, and return this rank's shards as plain tensors with gradients as DTensors.

    The gradients are reduced `jointly` when the backward has computed the last one, or else each alone.
    """
    # A frozen parameter would require a gradient beside a trained one.
    trained = [index for index, (parameter, *_) in enumerate(parameters) if parameter.requires_grad]
    values = [each[0] if each[0].requires_grad else _forward(*each) for each in parameters]
    for group in filter(None, [trained] if jointly else [[index] for index in trained]):
        chosen = [parameters[index][1:] for index in group]
        results = _RedistributeParameters.apply(chosen, *(values[index] for index in group))  # type: ignore[no-untyped-call]
        for index, result in zip(group, results, strict=True):
            values[index] = result
    return values


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


@torch.no_grad()
def _forward(parameter: DTensor, redistribution: Redistribution, name: str) -> Tensor:
    # detach, because without a collective the result is the local tensor itself, and autograd would attach a Function
    # to it.
    return _redistributed(parameter.to_local().detach(), *redistribution.forward, name)


class _RedistributeParameters(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, redistributions: Sequence[tuple[Redistribution, str]], *parameters: DTensor
    ) -> tuple[Tensor, ...]:
        context.set_materialize_grads(False)  # parameters that are not used get no gradient
        context.redistributions = redistributions
        context.layouts = [(parameter.shape, parameter.stride()) for parameter in parameters]
        results = zip(parameters, redistributions, strict=True)
        return tuple(_forward(parameter, *redistribution) for parameter, redistribution in results)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor | None) -> tuple[DTensor | None, ...]:
        present = [index for index, gradient in enumerate(gradients) if gradient is not None]
        given = [gradient for gradient in gradients if gradient is not None]
        count = Counter(map(id, given))
        are_shared = [count[id(gradient)] > 1 or has_other_owner(gradient) for gradient in given]
        results: list[DTensor | None] = [None] * len(gradients)
        reduced = _reduced(given, [context.redistributions[index] for index in present])
        for index, gradient, is_shared, local in zip(present, given, are_shared, reduced, strict=True):
            # Without a collective, the gradient of a sum of parameters is one tensor for all of them. Autograd copies
            # such a tensor before it accumulates into it, but does not see it inside of a DTensor.
            local = local.contiguous()
            if local is gradient and is_shared:
                local = local.clone()
            _, target = context.redistributions[index][0].backward
            shape, stride = context.layouts[index]
            results[index] = DTensor.from_local(
                local, target.mesh.device_mesh, target.placements, run_check=False, shape=shape, stride=stride
            )
        return None, *results


def _reduced(gradients: Sequence[Tensor], redistributions: Sequence[tuple[Redistribution, str]]) -> list[Tensor]:
    """Redistribute gradients, with one collective for gradients of one dtype where `joint_steps` allows it."""
    results = list(gradients)
    for dtype in dict.fromkeys(gradient.dtype for gradient in gradients):
        own = [index for index, gradient in enumerate(gradients) if gradient.dtype == dtype]
        for together in joint_steps(tuple(redistributions[index][0].backward for index in own)):
            indices, steps = [own[number] for number, _ in together], [step for _, step in together]
            others = f" and {len(indices) - 1} others" * (len(indices) > 1)
            what = f"gradient of {redistributions[indices[0]][1]}{others}"
            for index, result in zip(indices, _run([results[i] for i in indices], steps, what), strict=True):
                results[index] = result
    return results


def _redistributed(local: Tensor, source: NamedSharding, target: NamedSharding, what: str) -> Tensor:
    """Redistribute this rank's shard from `source` to `target`, without autograd."""
    result = local
    for step in redistribution_steps(source, target):
        (result,) = _run([result], [step], what)
    summed = [axis for axis in target.partial if axis not in source.partial]
    if not summed:
        return result
    # A tensor becomes partial without communication: the first rank along the axis keeps the values, the others get
    # zeros. The values are cloned, because without a collective the result shares memory with the source.
    place = source.mesh.coordinates()
    return result.clone() if all(place[axis] == 0 for axis in summed) else torch.zeros_like(result)


def _run(locals_: Sequence[Tensor], steps: Sequence[Step], what: str) -> Sequence[Tensor]:
    """Run a step for this rank's shard of each of several tensors, over the same axes; a reduction is one collective.

    Called on local tensors, because DTensor takes several times as long to choose the collective.
    """
    kind, axes, dim, before, _ = steps[0]
    mesh, axis = before.mesh, axes[0]
    if mesh.size(*axes) == 1:
        return locals_
    if kind == "all-gather":
        return [_all_gather(local, mesh, axis, dim, what) for local in locals_]
    if kind == "slice":
        # Cloned, because the result of a Function must not be a view of its input.
        return [local.chunk(mesh.size(axis), dim)[mesh.coordinates()[axis]].clone() for local in locals_]
    if kind == "reduce-scatter":
        return _reduce_scatter(locals_, mesh, axis, [step.dim for step in steps], what)
    large = [axis for axis in axes if mesh.size(axis) > 1]
    if len(locals_) == 1:
        total = locals_[0].clone(memory_format=torch.contiguous_format)
        all_reduce(total, what, group=mesh.process_group(*large))
        return [total]
    packed = torch.cat([local.flatten() for local in locals_])
    all_reduce(packed, what, group=mesh.process_group(*large))
    split = torch.split(packed, [local.numel() for local in locals_])
    return [part.view(local.shape) for part, local in zip(split, locals_, strict=True)]


def _all_gather(local: Tensor, mesh: Mesh, axis: str, dim: int, what: str) -> Tensor:
    size = mesh.size(axis)
    gathered = local.new_empty(size * local.shape[0], *local.shape[1:])
    all_gather(gathered, local.contiguous(), what, group=mesh.process_group(axis))
    return gathered if dim == 0 else torch.cat(gathered.chunk(size), dim)


def _reduce_scatter(locals_: Sequence[Tensor], mesh: Mesh, axis: str, dims: Sequence[int], what: str) -> list[Tensor]:
    size, group = mesh.size(axis), mesh.process_group(axis)
    # The parts of the ranks one after the other, as dim 0.
    summands = [
        local if dim == 0 else torch.cat(local.chunk(size, dim)) for local, dim in zip(locals_, dims, strict=True)
    ]
    shapes = [(summand.shape[0] // size, *summand.shape[1:]) for summand in summands]
    if len(summands) == 1:
        reduced = summands[0].new_empty(shapes[0])
        reduce_scatter(reduced, summands[0].contiguous(), what, group=group)
        return [reduced]
    packed = torch.cat([summand.reshape(size, -1) for summand in summands], 1)
    reduced = packed.new_empty(packed.shape[1])
    reduce_scatter(reduced, packed.flatten(), what, group=group)
    split = torch.split(reduced, [summand.numel() // size for summand in summands])
    return [part.view(shape) for part, shape in zip(split, shapes, strict=True)]
