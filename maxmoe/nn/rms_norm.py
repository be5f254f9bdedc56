"""RMS norm: a function, and the module in a Mixture-of-Experts layer."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxmoe.declaration import Declaration


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute x / sqrt(mean(x^2) + eps) * weight over the last dim of x ``(..., D)``, with a weight ``(D,)``."""
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # torch.compile fuses the operators of torch
        return F.rms_norm(x, weight.shape, weight, eps)
    out: Tensor = _RmsNorm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return out


class _RmsNorm(torch.autograd.Function):
    # torch has one operator for the forward only. Recorded by autograd, it is composed of six, which save the input and
    # the normalized input, and whose backward reads and writes tensors of this size about three times as often.
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, float], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])
        ctx.eps = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        g, scale, factors = gradient.to(wide), weight.to(wide), _factors(x, ctx.eps)
        normalized = x * factors
        products = (g * normalized).flatten(0, -2)
        means = torch.mv(products, scale).div(x.shape[-1]).view_as(factors)
        grad_x = torch.addcmul(g * scale, normalized, means, value=-1) * factors
        return grad_x.to(x.dtype), products.sum(0).to(weight.dtype), None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor | None, weight_tangent: Tensor | None, _eps: None) -> Tensor:
        x, weight = ctx.saved_tensors
        factors = _factors(x, ctx.eps)
        result: Tensor = torch.zeros_like(x) if weight_tangent is None else x * factors * weight_tangent
        if tangent is not None:
            mean = (x * tangent).mean(-1, keepdim=True)
            result = result + (tangent - x * factors.square() * mean) * factors * weight
        return result.to(x.dtype)


def _factors(x: Tensor, eps: float) -> Tensor:
    """Return 1 / sqrt(mean(x^2) + eps) of each token ``(..., 1)``, in float32 or wider."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return (norms.square() / x.shape[-1] + eps).rsqrt()


class LatentNorm(nn.Module):
    """RMS norm of latent rows, or of the outputs of experts, with a weight around 0, or around 1 with ``offset=0``.

    norm(x) = x / sqrt(mean(x^2) + eps) * (offset + weight)

    Args:
        size: L, width of the rows.
        eps: added to the mean of the squares.
        scales_input: normalize x * (offset + weight) instead, without a factor after it.
        offset: added to the weight.
        **options: device and dtype of the parameter.
    """

    weight: Tensor

    def __init__(
        self, size: int, eps: float, *, scales_input: bool = False, offset: float = 1.0, **options: Any
    ) -> None:
        super().__init__()
        self.eps, self.scales_input, self.offset = eps, scales_input, offset
        self.weight = nn.Parameter(torch.empty(size, **options))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight for a factor of one."""
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize rows x ``(R, L)``."""
        factor = (self.offset + self.weight).to(x.dtype)
        if self.scales_input:
            return rms_norm(x * factor, torch.ones_like(factor), self.eps)
        return rms_norm(x, factor, self.eps)

    @property
    def declaration(self) -> Declaration:
        """Declare the logical name."""
        return Declaration(logical_names={"weight": ("norm",)})
