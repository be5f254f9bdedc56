"""Low-rank factors beside a stack of matrices."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import Self


class LowRankFactors(NamedTuple):
    """Low-rank factors beside a stack of matrices W: rows are multiplied by W + scale * a b.

    x (W + scale * a b) = x W + (x a) (scale * b)

    The operators compute the right-hand side, as r more steps of the inner dimension. Neither the sum of the matrices
    nor its gradient is formed.

    Attributes:
        a: ``(L, in, r)``, floating, "lora_A", transposed.
        b: ``(L, r, out)``, floating, "lora_B", transposed.
        scale: factor of the product, ``alpha / r`` in LoRA.

    Source: LoRA (arXiv:2106.09685).

    Example:
        >>> a, b = torch.randn(4, 16, 2), torch.zeros(4, 2, 32)
        >>> rows = maxmoe.ops.gmm(lhs, rhs, group_sizes, factors=maxmoe.ops.LowRankFactors(a, b, scale=0.5))
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @classmethod
    def side_by_side(cls, factors: Sequence[Self]) -> Self:
        """Join the factors of several adapters, whose products are added.

        Args:
            factors: factors beside the same matrices; their ranks and scales may differ.

        Returns:
            Factors whose r is the sum of theirs.
        """
        if not factors:
            raise ValueError("factors must have at least one item, got none")
        if len(factors) == 1:
            return factors[0]
        scaled = [b if scale == 1.0 else b * scale for _, b, scale in factors]
        return cls(torch.cat([a for a, _, _ in factors], dim=2), torch.cat(scaled, dim=1))

    def transposed(self) -> Self:
        """Return the factors of the transposed matrices, W^T + scale * b^T a^T."""
        return type(self)(self.b.transpose(1, 2), self.a.transpose(1, 2), self.scale)


def operands(factors: LowRankFactors, dtype: torch.dtype, name: str) -> tuple[Tensor, Tensor]:
    """Return `a` and scale * b as the operators take them: with the dtype of the matrices, and b contiguous.

    The product with the scale and the casts are small: they have r columns. Their gradients are torch's.
    """
    if not isinstance(factors, LowRankFactors):
        raise TypeError(f"{name} must be maxmoe.ops.LowRankFactors, got {type(factors).__name__}")
    a, b, scale = factors
    for field, factor in (("a", a), ("b", b)):
        if not isinstance(factor, Tensor) or factor.dim() != 3 or not factor.is_floating_point():
            got = f"{factor.dtype} of shape {tuple(factor.shape)}" if isinstance(factor, Tensor) else repr(factor)
            dims = "(L, in, r)" if field == "a" else "(L, r, out)"
            raise ValueError(f"{name}.{field} must be floating, of shape {dims}, got {got}")
    if not isinstance(scale, int | float | Tensor):
        raise TypeError(f"{name}.scale must be a number, got {type(scale).__name__}")
    is_one = not isinstance(scale, Tensor) and scale == 1
    return a.to(dtype), (b if is_one else b * scale).to(dtype).contiguous()
