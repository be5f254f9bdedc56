"""Gradient clipping for DTensors on several meshes, and plain tensors."""

from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor


@torch.no_grad()
def clip_grad_norm_(parameters: Iterable[Tensor], max_norm: float) -> Tensor:
    """Clip the total norm of gradients, as `torch.nn.utils.clip_grad_norm_` does for those on one mesh.

    norm = sqrt(sum of the squares of all entries),   gradient *= min(1, max_norm / (norm + 1e-6))

    Args:
        parameters: DTensors on any meshes, and plain tensors that are the same on every rank.
        max_norm: of all gradients together.

    Returns:
        ``()``, the norm before; a plain tensor, the same on every rank.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    if not by_mesh:
        return torch.zeros(())
    norms = []
    for group in by_mesh.values():
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in group if parameter.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    for group in by_mesh.values():
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total
