"""Sums of rows by index."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake


def ragged_gather_reduce(
    rows: Tensor,
    index: Tensor,
    group_size: int,
    weights: Tensor | None = None,
    *,
    valid: Tensor | None = None,
) -> Tensor:
    """Sum rows by index, `group_size` of them at a time.

    out[t] = sum_j weights[j] * rows[index[j]]   over j in [t * group_size, (t + 1) * group_size) with valid[j] and
    index[j] >= 0, in the order of j, in float32 or wider

    Rows that no valid j names are never read. The transpose is `ragged_scatter_add`.

    Args:
        rows: ``(R, D)``, floating.
        index: ``(M,)``, int64, each in [-1, R).
        group_size: divides M.
        weights: ``(M,)``, floating, or None for ones.
        valid: ``(M,)``, bool, or None for all.

    Returns:
        ``(M / group_size, D)``, dtype of rows.

    Raises:
        ValueError: for an index out of range or another wrong argument.

    Source: MaxText `ragged_gather_reduce`.
    """
    out: Tensor = torch.ops.maxmoe.ragged_gather_reduce(rows, index, group_size, weights, valid=valid)
    return out


@register_fake("ragged_gather_reduce")
def _ragged_gather_reduce_fake(
    rows: Tensor,
    index: Tensor,
    group_size: int,
    weights: Tensor | None = None,
    *,
    valid: Tensor | None = None,
) -> Tensor:
    return rows.new_empty(index.shape[0] // group_size, rows.shape[1])
