"""Linear map with accumulation in float32 or wider."""

import functools

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Apply a linear map, accumulated in float32, or in float64 if x or weight is float64.

    out[t, e] = <x[t], weight[e]> + bias[e]

    For the logits of a router. Only the result is rounded; x and weight are neither converted to another dtype nor
    saved in one. Gradients are computed in the same way and rounded once, to the dtype of their argument. Autocast has
    no effect. out[t] is bitwise independent of the other rows.

    Args:
        x: ``(T, D)``, floating, input.
        weight: ``(E, D)``, floating.
        bias: ``(E,)``, floating, or None.
        out_dtype: floating dtype of the result; None for the dtype of the accumulation.

    Returns:
        ``(T, E)``, `out_dtype`, output.
    """
    out: Tensor = torch.ops.maxmoe.linear(x, weight, bias, out_dtype=out_dtype)
    return out


@register_fake("linear")
def _linear_fake(x: Tensor, weight: Tensor, out_dtype: torch.dtype | None = None, **_: object) -> Tensor:
    sum_dtype = functools.reduce(torch.promote_types, (x.dtype, weight.dtype, torch.float32))
    return x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype or sum_dtype)
