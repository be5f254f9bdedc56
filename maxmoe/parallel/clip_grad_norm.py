"""Gradient clipping for DTensors on several meshes, and plain tensors."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from maxmoe._torch import assert_async, root_mesh
from maxmoe.ranks.checksum import are_equal, checksum
from maxmoe.ranks.named_collectives import all_reduce
from maxmoe.sharding.mesh import STAGE_AXIS


@torch.no_grad()
def clip_grad_norm_(parameters: Tensor | Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip the total norm of gradients, like `torch.nn.utils.clip_grad_norm_`, but for DTensors on several meshes.

    norm = sqrt(sum of the squares of all entries),   gradient *= min(1, max_norm / (norm + 1e-6))

    All ranks pass the same parameters. Their meshes decide what is communicated, whether they have gradients or not.
    With `maxmoe.pipeline`, call `Pipeline.clip_grad_norm_`.

    Args:
        parameters: DTensors on any meshes, and plain tensors that are equal on all ranks.
        max_norm: largest norm of all gradients together.

    Returns:
        ``()``, float64, norm before clipping; a plain tensor, equal on all ranks.

    Raises:
        ValueError: without parameters; for parameters of pipeline stages; on every rank of a mesh, if its ranks have
            gradients of different parameters.
    """
    parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    if not parameters:
        raise ValueError(
            "parameters must not be empty: an iterator can be read only once; with "
            "maxmoe.pipeline, call clip_grad_norm_ of the pipeline"
        )
    if any(is_of_a_stage(parameter) for parameter in parameters):
        raise ValueError(
            "parameters must not belong to a pipeline stage, because other stages may have none: call "
            "clip_grad_norm_ of the pipeline"
        )
    return clip(parameters, max_norm, squared_norm(parameters))


def squared_norm(parameters: Sequence[Tensor]) -> Tensor:
    """Sum the squares of the gradients of any number of parameters over the ranks of their meshes.

    Returns ``(2,)``, float64: the sum, and the number of meshes whose ranks have gradients of different parameters.
    """
    device = parameters[0].device if parameters else None
    plain = [each.grad for each in parameters if not isinstance(each, DTensor) and each.grad is not None]
    total = torch.stack([_squares(plain, device), torch.zeros((), dtype=torch.float64, device=device)])
    by_mesh: dict[DeviceMesh, list[DTensor]] = {}
    for parameter in parameters:
        if isinstance(parameter, DTensor):
            gradients = by_mesh.setdefault(parameter.device_mesh, [])
            gradients += [] if parameter.grad is None else [parameter.grad]  # type: ignore[list-item]
    for mesh, gradients in by_mesh.items():
        total += _squared_norm_on_mesh(gradients, mesh, device)
    return total


def clip(parameters: Sequence[Tensor], max_norm: float, squares: Tensor) -> Tensor:
    """Clip the gradients, given the result of `squared_norm` over all ranks, and return their norm."""
    total, num_different = squares.unbind()
    message = (
        "clip_grad_norm_: all ranks must have gradients of the same parameters, got others on some ranks: every rank "
        "must call backward, and use the same modules in the forward"
    )
    if not squares.is_cpu:
        assert_async(num_different == 0, message)
    elif num_different:
        raise ValueError(message)
    norm = total.sqrt()
    torch.nn.utils.clip_grads_with_norm_([*map(with_local_gradient, parameters)], max_norm, norm)
    return norm


def with_local_gradient(parameter: Tensor) -> Tensor:
    """Return a tensor whose gradient is the local shard of a DTensor's gradient, or the parameter if it has none."""
    if not isinstance(parameter.grad, DTensor):
        return parameter
    gradient = parameter.grad.to_local()
    holder = gradient.detach()
    holder.grad = gradient
    return holder


def is_of_a_stage(parameter: Tensor) -> bool:
    """Return whether the mesh of a parameter is the part of a larger one that has one of several pipeline stages."""
    if not isinstance(parameter, DTensor):
        return False
    whole = root_mesh(parameter.device_mesh)
    axes = whole.mesh_dim_names or ()
    return STAGE_AXIS in axes and whole.size(axes.index(STAGE_AXIS)) > 1


def _squared_norm_on_mesh(gradients: Sequence[DTensor], mesh: DeviceMesh, device: torch.device | None) -> Tensor:
    """Compute `squared_norm` of DTensors from their local shards, because torch warns on several mesh axes."""
    partial: list[DTensor] = []
    whole: list[DTensor] = []
    for gradient in gradients:
        (partial if any(placement.is_partial() for placement in gradient.placements) else whole).append(gradient)
    facts = (len(gradients), sum(gradient.numel() for gradient in gradients), len(partial))
    mine = checksum(torch.tensor(facts, dtype=torch.float64, device=device))
    squares, *checksums = _all_reduce(torch.cat([_squares_of_shards(whole, device).reshape(1), mine]), mesh)
    is_different = ~are_equal(torch.stack(checksums))
    # Ranks with other gradients would not take part in their reductions.
    if partial and not is_different:
        squares = squares + _all_reduce(_squares_of_shards([_reduced(each) for each in partial], device), mesh)
    return torch.stack([squares, is_different.double()])


def _squares_of_shards(gradients: Sequence[DTensor], device: torch.device | None) -> Tensor:
    """Sum the squares of this rank's shards, without copies: the first rank along each replicated axis counts them."""
    return _squares([gradient.to_local() for gradient in gradients if not _is_copy(gradient)], device)


def _is_copy(gradient: DTensor) -> bool:
    coordinates = gradient.device_mesh.get_coordinate() or ()
    return any(
        placement.is_replicate() and coordinate > 0
        for placement, coordinate in zip(gradient.placements, coordinates, strict=True)
    )


def _reduced(gradient: DTensor) -> DTensor:
    """All-reduce the axes over which a gradient is partial."""
    placements = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    return gradient.redistribute(placements=placements)


def _all_reduce(sums: Tensor, mesh: DeviceMesh) -> Tensor:
    """Sum over all axes of a mesh.

    Axis by axis, not over mesh._flatten(): DTensor gathers uneven dims wrongly on a mesh that has a flattened one
    (https://github.com/pytorch/pytorch/issues/194457). All groups of an axis sum equal numbers in the same order, so
    that the norm is bitwise equal on all ranks.
    """
    for group in mesh.get_all_groups():
        all_reduce(sums, "squares of gradients", group=group)
    return sums


def _squares(gradients: Sequence[Tensor], device: torch.device | None) -> Tensor:
    """Sum the squares of tensors, ``()``, float64."""
    # float64 for any dtypes of the gradients, so that the sums of all ranks and meshes have one dtype. torch would
    # round the norm of each gradient to its dtype, in which a float16 norm overflows.
    wide = [gradient for gradient in gradients if gradient.dtype.itemsize >= 4]
    norms = [torch.zeros((), dtype=torch.float64, device=device)]
    norms += [torch.nn.utils.get_total_norm(wide).double()] if wide else []
    norms += [
        torch.linalg.vector_norm(gradient, dtype=torch.float32).double()
        for gradient in gradients
        if gradient.dtype.itemsize < 4
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms)).square()
    return total
