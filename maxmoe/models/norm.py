"""RMSNorm of a decoder."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from maxmoe.nn import TOKEN_DIMS, Checkpointed, Declaration, SavedTensor


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


class Norm(Checkpointed, nn.RMSNorm):
    """x / sqrt(mean(x^2) + eps) * weight, over the hidden dim."""

    recompute_names = ("norms",)

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x ``(..., D)``."""
        if torch.compiler.is_compiling() or not torch.is_grad_enabled():  # torch.compile fuses the operators of torch
            return super().forward(x)
        out: Tensor = _RmsNorm.apply(x, self.weight, self.eps)  # type: ignore[no-untyped-call]
        return out

    @property
    def declaration(self) -> Declaration:
        """Declare logical names and saved tensors."""
        return Declaration(logical_names={"weight": ("norm",)}, saved_tensors=self._saved_tensors)

    def _saved_tensors(self, batch: int, length: int) -> dict[str, SavedTensor]:
        """Describe the input, which is all-gathered if the residual stream is sharded."""
        saved = {"input": SavedTensor((batch, length, len(self.weight)), (*TOKEN_DIMS, None))}
        if self.is_recomputed:
            saved["argument"] = SavedTensor((batch, length, len(self.weight)), (*TOKEN_DIMS, "activation_embed"))
        return self.mark_saved(saved, "argument")
