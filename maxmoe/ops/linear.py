"""Linear map with sums in float32 or wider."""

import functools

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Map rows, with sums in float32 whatever the dtypes, or in float64 if that of x or weight is.

    out[t, e] = <x[t], weight[e]> + bias[e]

    The logits of a router. Nothing is rounded before the result, no copy of x or weight in another dtype is made or
    saved for backward, and the gradients are computed in the same way, each rounded once to the dtype of its argument.
    Autocast changes nothing. The bits of out[t] depend on x[t] alone, not on the other rows.

    Args:
        x: ``(T, D)``, floating.
        weight: ``(E, D)``, floating.
        bias: ``(E,)``, floating, or None.
        out_dtype: floating; None for the dtype of the sums.

    Returns:
        ``(T, E)``, `out_dtype`.

    Raises:
        ValueError: for sizes that do not fit or another wrong argument.
    """
    out: Tensor = torch.ops.maxmoe.linear(x, weight, bias, out_dtype=out_dtype)
    return out


@register_fake("linear")
def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None
) -> Tensor:
    sum_dtype = functools.reduce(torch.promote_types, (x.dtype, weight.dtype, torch.float32))
    return x.new_empty(x.shape[0], weight.shape[0], dtype=out_dtype or sum_dtype)
