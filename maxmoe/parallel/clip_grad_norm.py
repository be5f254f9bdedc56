"""Gradient clipping for DTensors on several meshes, and plain tensors."""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from maxmoe._torch import root_mesh
from maxmoe.named_collectives import all_reduce
from maxmoe.sharding.mesh import STAGE_AXIS


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip the total norm of gradients, like `torch.nn.utils.clip_grad_norm_`, but for DTensors on several meshes.

    norm = sqrt(sum of the squares of all entries),   gradient *= min(1, max_norm / (norm + 1e-6))

    With `maxmoe.pipeline`, each rank passes the parameters of its stages, and the norm is that over all stages.

    Args:
        parameters: DTensors on any meshes, and plain tensors that are equal on all ranks.
        max_norm: largest norm of all gradients together.

    Returns:
        ``()``, float64, norm before clipping; a plain tensor, equal on all ranks.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    parameters = list(parameters)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = [torch.zeros((), dtype=torch.float64, device=parameters[0].device if parameters else None)]
    for mesh, group in by_mesh.items():
        gradients = [parameter.grad for parameter in group if parameter.grad is not None]
        norms.append(_norm(gradients) if mesh is None else _norm_on_mesh(gradients, mesh))
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    # Also if this stage has no gradients, because the other stages wait for it.
    if (stages := _stages_of(parameters)) is not None:
        squares = total.square()
        all_reduce(squares, "squares of gradients over stages", group=stages)
        total = squares.sqrt()
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def _stages_of(parameters: Iterable[Tensor]) -> dist.ProcessGroup | None:
    """Return the process group over the pipeline stages, if the mesh of the parameters is that of one stage."""
    meshes = {parameter.device_mesh for parameter in parameters if isinstance(parameter, DTensor)}
    wholes = {whole for mesh in meshes if STAGE_AXIS in ((whole := root_mesh(mesh)).mesh_dim_names or ())}
    return next((whole.get_group(STAGE_AXIS) for whole in wholes), None)


def _norm(gradients: Sequence[Tensor]) -> Tensor:
    # float64 for any dtypes of the gradients, so that the norms of all ranks and meshes have one dtype. torch would
    # round the norm of each gradient to its dtype, in which a float16 norm overflows.
    wide = [gradient for gradient in gradients if gradient.dtype.itemsize >= 4]
    norms = [torch.nn.utils.get_total_norm(wide).double()] if wide else []
    norms += [
        torch.linalg.vector_norm(gradient, dtype=torch.float32).double()
        for gradient in gradients
        if gradient.dtype.itemsize < 4
    ]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def _norm_on_mesh(gradients: Sequence[Tensor], mesh: DeviceMesh) -> Tensor:
    """Compute the norm of DTensors from the squares of the local shards, because torch warns on several mesh axes."""
    local = [part for gradient in gradients if isinstance(gradient, DTensor) for part in _parts_to_count(gradient)]
    squares = _norm(local or [torch.zeros_like(gradients[0].to_local())]).square()  # type: ignore[attr-defined]
    # Axis by axis, not over mesh._flatten(): DTensor gathers uneven dims wrongly on a mesh that has a flattened one
    # (https://github.com/pytorch/pytorch/issues/194457). All groups of an axis sum equal numbers in the same order, so
    # that the norm is bitwise equal on all ranks.
    for group in mesh.get_all_groups():
        all_reduce(squares, "squares of gradients", group=group)
    return squares.sqrt()


def _parts_to_count(gradient: DTensor) -> list[Tensor]:
    """Return this rank's shard, or nothing if it is a copy: the first rank along each replicated axis counts it."""
    summed = [Replicate() if placement.is_partial() else placement for placement in gradient.placements]
    gradient = gradient.redistribute(placements=summed)
    coordinates = gradient.device_mesh.get_coordinate() or ()
    is_copy = any(
        placement.is_replicate() and coordinate > 0
        for placement, coordinate in zip(gradient.placements, coordinates, strict=True)
    )
    return [] if is_copy else [gradient.to_local()]
