"""Matrices in a parameter, and Newton-Schulz: approximate the nearest semi-orthogonal matrices by products."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from maxmoe import _C
from maxmoe.declaration import FusedGate, gate_up_slices

Step: TypeAlias = tuple[float, float, float]
Coefficients: TypeAlias = Step | Sequence[Step] | Literal["quintic", "polar_express"]

QUINTIC: Step = (3.4445, -4.7750, 2.0315)
CHUNK = 2**26  # matrix elements that are orthogonalised at a time, to bound the memory of the products


class Matrix(NamedTuple):
    """The matrices in the last two dims of a parameter. All dims before them are stacked.

    Args:
        input_dim: dim that is multiplied with the input: -1 for ``[..., out, in]``, the layout of `nn.Linear`; -2 for
            ``[..., in, out]``, the layout of the experts.
        fused_gate: layout of gate and up along the dim of the outputs, which holds both; None for a single matrix.
    """

    input_dim: int = -1
    fused_gate: FusedGate | None = None

    def views(self, tensor: Tensor) -> list[Tensor]:
        """Return a view ``(..., out, in)`` of a tensor; if fused, views ``(..., out / 2, in)`` of gate and up."""
        matrices = tensor if self.input_dim == -1 else tensor.mT
        if self.fused_gate is None:
            return [matrices]
        return [matrices[..., half, :] for half in gate_up_slices(matrices.shape[-2], self.fused_gate)]

    def __str__(self) -> str:
        text = "[out, in]" if self.input_dim == -1 else "[in, out]"
        return text if self.fused_gate is None else f"{text}, gate and up {self.fused_gate}"


# Each step is optimal after the steps before it, for singular values from 1e-3 to 1. Rounding may make singular values
# larger than 1, where these polynomials diverge; each is therefore a polynomial of x / 1.01, but the last converges.
POLAR_EXPRESS: tuple[Step, ...] = (
    *(
        (a / 1.01, b / 1.01**3, c / 1.01**5)
        for a, b, c in (
            (8.28721201814563, -23.595886519098837, 17.300387312530933),
            (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
            (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
            (3.3184196573706015, -2.488488024314874, 0.51004894012372),
            (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
            (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
            (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
        )
    ),
    (1.875, -1.25, 0.375),
)
COEFFICIENT_SETS: dict[str, tuple[Step, ...]] = {"quintic": (QUINTIC,), "polar_express": POLAR_EXPRESS}


def steps_of(coefficients: Coefficients, num_steps: int) -> list[Step]:
    """Return a triple of coefficients for each step; if there are fewer, the last one is repeated."""
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENT_SETS:
            raise ValueError(f"ns_coefficients must be one of {sorted(COEFFICIENT_SETS)}, got {coefficients!r}")
        coefficients = COEFFICIENT_SETS[coefficients]
    table: Any = coefficients if isinstance(coefficients[0], Sequence) else [coefficients]
    steps = [(float(a), float(b), float(c)) for a, b, c in table]
    return [steps[min(number, len(steps) - 1)] for number in range(num_steps)]


def fast_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of Newton-Schulz: bfloat16 if the device multiplies it, else float32."""
    # Without AVX512-BF16, products of bfloat16 are a scalar loop in torch.
    multiplies_bfloat16 = device.type != "cpu" or "avx512bf16" in _C.build_info()["supported_isas"]
    return torch.bfloat16 if multiplies_bfloat16 else torch.float32


def orthogonalize(matrices: Tensor, steps: Sequence[Step], eps: float) -> Tensor:
    """Move the singular values of the matrices ``(..., m, n)`` towards 1; matrices of zeros stay zero.

        X = M / max(|M|, eps),   then for each step   G = X X^T,   X = a X + (b G + c G G) X

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
    """Run Newton-Schulz on a matrix, with the operators of `torch.optim.Muon` for equal bits, or on a 3-D stack."""
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
