"""Newton-Schulz: the nearest semi-orthogonal matrix, by products alone."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from maxmoe._library import build_info

Step: TypeAlias = tuple[float, float, float]
Coefficients: TypeAlias = Step | Sequence[Step] | Literal["quintic", "polar_express"]

QUINTIC: Step = (3.4445, -4.7750, 2.0315)
MAX_STEPS = 100
CHUNK = 2**26  # elements of matrices that are orthogonalised at a time, which bounds the memory of the products


def _with_margin(step: Step, margin: float) -> Step:
    """The same polynomial of x / margin."""
    return (step[0] / margin, step[1] / margin**3, step[2] / margin**5)


# Each step is the best one after those before it, for singular values from 1e-3 to 1. The margin is for singular values
# that rounding makes larger than 1: all but the last polynomial, which is repeated, would throw them out.
_POLAR_EXPRESS_LAST: Step = (1.875, -1.25, 0.375)
POLAR_EXPRESS: tuple[Step, ...] = (
    *(
        _with_margin(step, 1.01)
        for step in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        )
    ),
    _POLAR_EXPRESS_LAST,
)
COEFFICIENT_SETS: dict[str, tuple[Step, ...]] = {"quintic": (QUINTIC,), "polar_express": POLAR_EXPRESS}


def steps_of(coefficients: Coefficients, num_steps: int) -> list[Step]:
    """List the coefficients of every step.

    Args:
        coefficients: those of all steps, or of each with the last ones repeated, or the name of a set.
        num_steps: how many.

    Returns:
        One triple for each step.

    Raises:
        ValueError: for another name, with the known ones; for other numbers than three; for more than 99 steps.
    """
    if not isinstance(num_steps, int) or not 0 <= num_steps < MAX_STEPS:
        raise ValueError(f"ns_steps must be an int from 0 to {MAX_STEPS - 1}, got {num_steps!r}")
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENT_SETS:
            raise ValueError(f"ns_coefficients must be one of {sorted(COEFFICIENT_SETS)}, got {coefficients!r}")
        table: Sequence[object] = COEFFICIENT_SETS[coefficients]
    else:
        is_one = len(coefficients) > 0 and isinstance(coefficients[0], float | int)
        table = [coefficients] if is_one else coefficients
    steps: list[Step] = []
    for step in table:
        if not isinstance(step, Sequence) or len(step) != 3:
            raise ValueError(f"ns_coefficients must be three numbers, or three for each step, got {coefficients!r}")
        steps.append((float(step[0]), float(step[1]), float(step[2])))
    if not steps:
        raise ValueError(f"ns_coefficients must be three numbers, or three for each step, got {coefficients!r}")
    return [steps[min(number, len(steps) - 1)] for number in range(num_steps)]


def fast_dtype(device: torch.device) -> torch.dtype:
    """Choose the dtype of the products: bfloat16 where the device multiplies it, else float32.

    Args:
        device: of the matrices.

    Returns:
        The dtype. On processors without AVX512-BF16 torch computes products of bfloat16 in a scalar loop.
    """
    multiplies_bfloat16 = device.type != "cpu" or "avx512bf16" in build_info()["supported_isas"]
    return torch.bfloat16 if multiplies_bfloat16 else torch.float32


def orthogonalize(matrices: Tensor, steps: Sequence[Step], eps: float) -> Tensor:
    """Move the singular values of matrices towards 1.

        X = M / max(|M|, eps),   then for each step   G = X X^T,   X = a X + (b G + c G G) X

    A matrix of zeros stays so.

    Args:
        matrices: ``(..., m, n)``; transposed for the products where m > n.
        steps: coefficients a, b, c of each.
        eps: the smallest norm to divide by.

    Returns:
        ``(..., m, n)``, dtype of `matrices`.

    Source: https://kellerjordan.github.io/posts/muon; polar express: arXiv:2505.16932.
    """
    if matrices.numel() == 0:
        return matrices
    if matrices.shape[-2] > matrices.shape[-1]:
        return orthogonalize(matrices.mT, steps, eps).mT
    if matrices.dim() == 2:
        return _iterate(matrices, steps, eps)
    flat = matrices.flatten(0, -3)
    chunks = torch.split(flat, max(CHUNK // flat[0].numel(), 1))
    done = [_iterate(chunk if len(chunk) > 1 else chunk[0], steps, eps).view(chunk.shape) for chunk in chunks]
    return (done[0] if len(done) == 1 else torch.cat(done)).view(matrices.shape)


def _iterate(x: Tensor, steps: Sequence[Step], eps: float) -> Tensor:
    """One matrix: the operators of `torch.optim.Muon`, for the same bits. More: batched products of them."""
    is_one = x.dim() == 2
    multiply_add = torch.addmm if is_one else torch.baddbmm
    norm = x.norm() if is_one else x.norm(dim=(-2, -1), keepdim=True)
    # Batched products of transposed views are slower.
    x = x / norm.clamp(min=eps) if is_one else (x / norm.clamp(min=eps)).contiguous()
    for a, b, c in steps:
        gram = x @ x.mT
        polynomial = multiply_add(gram, gram, gram, beta=b, alpha=c)
        x = multiply_add(x, polynomial, x, beta=a)
    return x
