"""One matrix of each expert: weights, bias and low-rank factors, as the operators take it."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self

from maxmoe.quantization import QuantizedStack


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
        >>> factors = maxmoe.ops.LowRankFactors(a, b, scale=0.5)
        >>> rows = maxmoe.ops.gmm(lhs, maxmoe.ops.Projection(rhs, factors=factors), group_sizes)
    """

    a: Tensor
    b: Tensor
    scale: float = 1.0

    @classmethod
    def side_by_side(cls, factors: Sequence[Self]) -> Self:
        """Join the factors of several adapters beside the same matrices, whose products are added: r is the sum."""
        if not factors:
            raise ValueError("factors must have at least one item, got none")
        if len(factors) == 1:
            return factors[0]
        scaled = [b if scale == 1.0 else b * scale for _, b, scale in factors]
        return cls(torch.cat([a for a, _, _ in factors], dim=2), torch.cat(scaled, dim=1))

    def transposed(self) -> Self:
        """Return the factors of the transposed matrices, W^T + scale * b^T a^T."""
        return type(self)(self.b.transpose(1, 2), self.a.transpose(1, 2), self.scale)


class Projection(NamedTuple):
    """One matrix of each of L experts, with what is added to its product.

    x -> x (W + scale * a b) + bias

    Attributes:
        weights: ``(L, in, out)``, floating, matrices W; or a `maxmoe.quantization.QuantizedStack` of this shape, which
            is decoded while it is multiplied and has no gradient. Results have the same bits as with
            ``weights.dequantize(dtype)``.
        bias: ``(L, out)``, dtype of W, or None.
        factors: low-rank factors, of any floating dtype, computed in the dtype of the rows; or None.
    """

    weights: Tensor | QuantizedStack
    bias: Tensor | None = None
    factors: LowRankFactors | None = None

    def map(self, function: Callable[[Tensor], Tensor]) -> "Projection":
        """Return a projection with function(tensor) in the place of each tensor; all have L as their first dim."""
        weights, bias, factors = self
        return Projection(
            weights.map(function) if isinstance(weights, QuantizedStack) else function(weights),
            None if bias is None else function(bias),
            None if factors is None else factors._replace(a=function(factors.a), b=function(factors.b)),
        )

    def arguments(self, name: str, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments that an operator on rows of a dtype has for the projection `name`, by their names.

        cpp/ops/projection.h has the same list.
        """
        weights, bias, factors = self
        given: dict[str, Any] = {name: weights}
        if isinstance(weights, QuantizedStack):
            if weights.dim() != 3:
                raise ValueError(f"{name} must be a stack of matrices (L, in, out), got {tuple(weights.shape)}")
            given = {
                name: weights.codes,
                f"{name}_scales": weights.scales,
                f"{name}_zeros": weights.zeros,
                f"{name}_row_scales": weights.row_scales,
                f"{name}_format": weights.format,
                f"{name}_columns": weights.columns,
                f"{name}_is_transposed": weights.is_transposed,
            }
        if bias is not None:
            given[f"{name}_bias"] = bias
        if factors is not None:
            given[f"{name}_a"], given[f"{name}_b"] = operands(factors, dtype, f"{name}.factors")
        return given


ProjectionLike: TypeAlias = Projection | QuantizedStack | Tensor


def as_projection(value: ProjectionLike) -> Projection:
    """Return a projection, which weights alone are, too."""
    return value if isinstance(value, Projection) else Projection(value)


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
