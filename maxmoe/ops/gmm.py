"""Grouped matrix multiply."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake


def gmm(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, *, bias: Tensor | None = None, group_offset: int = 0) -> Tensor:
    """Multiply every group of rows by its own matrix.

    out[r] = lhs[r] @ rhs[g - group_offset] + bias[g - group_offset]   for the rows r of group g

    G may exceed L: rows of groups without a matrix here come out zero, as do rows past the last group, whatever lhs
    holds there. `rhs` may be a transposed view, at no cost.

    Args:
        lhs: ``(R, D)``, floating.
        rhs: ``(L, D, F)``, dtype of lhs.
        group_sizes: ``(G,)``, int64, rows of each group, in order; their sum is at most R.
        bias: ``(L, F)``, dtype of lhs, or None.
        group_offset: the group of rhs[0].

    Returns:
        ``(R, F)``, dtype of lhs.

    Raises:
        ValueError: for sizes that do not fit or another wrong argument.

    Source: MegaBlocks (arXiv:2211.15841); MaxText `gmm`.
    """
    out: Tensor = torch.ops.maxmoe.gmm(lhs, rhs, group_sizes, bias=bias, group_offset=group_offset)
    return out


@register_fake("gmm")
def _gmm_fake(
    lhs: Tensor, rhs: Tensor, group_sizes: Tensor, *, bias: Tensor | None = None, group_offset: int = 0
) -> Tensor:
    return lhs.new_empty(lhs.shape[0], rhs.shape[2])
