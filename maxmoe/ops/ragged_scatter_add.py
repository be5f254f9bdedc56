"""Scatter-add of rows by index."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake


def ragged_scatter_add(
    rows: Tensor, index: Tensor, num_rows: int, group_size: int = 1, weights: Tensor | None = None
) -> Tensor:
    """Scatter rows by index, scale them, and sum the rows with equal index.

    out[n] = sum_j weights[j] * rows[j // group_size]   over the j with index[j] == n, in the order of j, in float32
    or wider; no atomics

    The transpose of `ragged_gather_reduce` and, with group_size 1, of `ragged_gather`.

    Args:
        rows: ``(M / group_size, D)``, floating.
        index: ``(M,)``, int64, row of the result for each summand, in [-1, num_rows).
        num_rows: number of rows of the result.
        group_size: number of entries of `index` per row.
        weights: ``(M,)``, floating, factor of each summand; None for ones.

    Returns:
        ``(num_rows, D)``, dtype of rows, sums.
    """
    out: Tensor = torch.ops.maxmoe.ragged_scatter_add(rows, index, num_rows, group_size, weights)
    return out


@register_fake("ragged_scatter_add")
def _ragged_scatter_add_fake(rows: Tensor, num_rows: int, **_: object) -> Tensor:
    return rows.new_empty(num_rows, rows.shape[1])
