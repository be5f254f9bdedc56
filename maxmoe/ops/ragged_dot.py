"""Dot products of pairs of rows."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake


def ragged_dot(a: Tensor, b: Tensor, index: Tensor, group_size: int = 1) -> Tensor:
    """Compute dot products of pairs of rows: the gradient of the weights of the other ragged operators.

    out[j] = <a[j // group_size], b[index[j]]>   for index[j] >= 0, else 0

    Args:
        a: ``(M / group_size, D)``, floating.
        b: ``(N, D)``, dtype of a.
        index: ``(M,)``, int64, row of b for each product, in [-1, N).
        group_size: number of entries of `index` per row of a.

    Returns:
        ``(M,)``, float32 or wider, dot products.
    """
    out: Tensor = torch.ops.maxmoe.ragged_dot(a, b, index, group_size)
    return out


@register_fake("ragged_dot")
def _ragged_dot_fake(a: Tensor, index: Tensor, **_: object) -> Tensor:
    return a.new_empty(index.shape[0], dtype=torch.promote_types(a.dtype, torch.float32))
