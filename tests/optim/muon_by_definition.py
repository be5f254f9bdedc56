"""Muon of one matrix in float64, by its singular values."""

from collections.abc import Sequence

import torch
from torch import Tensor

QUINTIC = ((3.4445, -4.7750, 2.0315),) * 5


def orthogonalized(matrix: Tensor, steps: Sequence[Sequence[float]] = QUINTIC, eps: float = 1e-7) -> Tensor:
    """Newton-Schulz by its polynomials, which act on the singular values only."""
    u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    s = s / max(float(s.square().sum().sqrt()), eps)
    for a, b, c in steps:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ vh


def muon_by_definition(
    weight: Tensor, gradients: Sequence[Tensor], *, lr: float, weight_decay: float = 0.1, momentum: float = 0.95
) -> tuple[Tensor, Tensor]:
    """Weight and momentum of a matrix ``[out, in]`` after a step for each gradient."""
    weight, average = weight.double(), torch.zeros_like(weight, dtype=torch.float64)
    scale = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
    for gradient in gradients:
        average = momentum * average + (1 - momentum) * gradient.double()
        update = momentum * average + (1 - momentum) * gradient.double()
        weight = (1 - lr * weight_decay) * weight - lr * scale * orthogonalized(update)
    return weight, average
