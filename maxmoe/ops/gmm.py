"""Grouped matrix multiplication."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake


def gmm(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, *, bias: Tensor | None = None, group_offset: int = 0) -> Tensor:
    """Multiply each group of rows by the matrix of the group.

    out[r] = lhs[r] @ rhs[g - group_offset] + bias[g - group_offset]   for the rows r of group g

    G may exceed L: rows of groups without a matrix in `rhs` are zero in the result, as are rows after the last group,
    for any values in lhs. `rhs` may be a transposed view, which is not copied.

    Args:
        lhs: ``(R, D)``, floating, rows sorted by group.
        rhs: ``(L, D, F)``, dtype of lhs, matrices of the groups.
        group_sizes: ``(G,)``, int64, number of rows of each group; their sum is at most R.
        bias: ``(L, F)``, dtype of lhs, or None.
        group_offset: index of the group that rhs[0] belongs to.

    Returns:
        ``(R, F)``, dtype of lhs, products.

    Source: MegaBlocks (arXiv:2211.15841); MaxText `gmm`.
    """
    out: Tensor = torch.ops.maxmoe.gmm(lhs, rhs, group_sizes, bias=bias, group_offset=group_offset)
    return out


@register_fake("gmm")
def _gmm_fake(lhs: Tensor, rhs: Tensor, *_: object, **__: object) -> Tensor:
    return lhs.new_empty(lhs.shape[0], rhs.shape[2])
