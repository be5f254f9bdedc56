"""Gather of rows by index."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake


def ragged_gather(
    x: Tensor, index: Tensor, weights: Tensor | None = None, *, start: int = 0, end: int | None = None
) -> Tensor:
    """Gather rows by index and scale them.

    out[i] = weights[i] * x[index[i]]   for start <= i < end and index[i] >= 0, else 0

    The transpose is `ragged_scatter_add`; if no index is repeated, `ragged_gather_reduce` with the inverse index.

    Args:
        x: ``(N, D)``, floating, rows.
        index: ``(M,)``, int64, row of x for each row of the result, in [-1, N).
        weights: ``(M,)``, floating, factor of each row of the result; None for ones.
        start: first row of the result that is gathered; earlier rows are zero.
        end: end of the rows that are gathered; later rows are zero; None for M.

    Returns:
        ``(M, D)``, dtype of x, gathered rows.

    Source: MaxText `ragged_gather`.
    """
    out: Tensor = torch.ops.maxmoe.ragged_gather(x, index, weights, start=start, end=end)
    return out


@register_fake("ragged_gather")
def _ragged_gather_fake(x: Tensor, index: Tensor, **_: object) -> Tensor:
    return x.new_empty(index.shape[0], x.shape[1])
