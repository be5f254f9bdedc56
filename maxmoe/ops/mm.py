"""Product of matrices of any dtypes, summed in float32 or wider."""

import functools

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake


def mm(a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    """Multiply two matrices, with sums in float32 whatever their dtypes; in float64 if one of them is.

    out[m, n] = sum_k a[m, k] * b[k, n] + bias[n]

    Nothing is rounded before the result, and no copy of a or b in another dtype is made or saved for backward. So are
    the gradients, each rounded once to the dtype of its argument. Autocast leaves it alone. A row of the result has the
    same bits whatever rows are beside it. `b` may be a transposed view, at no cost.

    Args:
        a: ``(M, K)``, floating.
        b: ``(K, N)``, floating.
        bias: ``(N,)``, floating, or None.
        out_dtype: floating; None for the dtype of the sums.

    Returns:
        ``(M, N)``, `out_dtype`.

    Raises:
        ValueError: for sizes that do not fit or another wrong argument.
    """
    out: Tensor = torch.ops.maxmoe.mm(a, b, bias=bias, out_dtype=out_dtype)
    return out


@register_fake("mm")
def _mm_fake(a: Tensor, b: Tensor, *, bias: Tensor | None = None, out_dtype: torch.dtype | None = None) -> Tensor:
    sum_dtype = functools.reduce(torch.promote_types, (a.dtype, b.dtype, torch.float32))
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype or sum_dtype)
