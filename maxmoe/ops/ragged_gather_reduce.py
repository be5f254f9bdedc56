"""Gather of rows by index, summed in groups."""

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
    """Gather rows by index, scale them, and sum groups of `group_size` rows.

    out[t] = sum_j weights[j] * rows[index[j]]   over j in [t * group_size, (t + 1) * group_size) with valid[j] and
    index[j] >= 0, in the order of j, in float32 or wider

    Rows without a valid entry of `index` are never read. The transpose is `ragged_scatter_add`.

    Args:
        rows: ``(R, D)``, floating.
        index: ``(M,)``, int64, row of each summand, in [-1, R).
        group_size: number of summands of each row of the result; divides M.
        weights: ``(M,)``, floating, factor of each summand; None for ones.
        valid: ``(M,)``, bool, False for summands to leave out; None for all True.

    Returns:
        ``(M / group_size, D)``, dtype of rows, sums.

    Source: MaxText `ragged_gather_reduce`.
    """
    out: Tensor = torch.ops.maxmoe.ragged_gather_reduce(rows, index, group_size, weights, valid=valid)
    return out


@register_fake("ragged_gather_reduce")
def _ragged_gather_reduce_fake(rows: Tensor, index: Tensor, group_size: int, **_: object) -> Tensor:
    return rows.new_empty(index.shape[0] // group_size, rows.shape[1])
