"""Grouped matrix multiplication."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake
from maxmoe.ops._low_rank import LowRankFactors, operands


def gmm(
    lhs: Tensor,
    rhs: Tensor,
    group_sizes: Tensor,
    *,
    bias: Tensor | None = None,
    factors: LowRankFactors | None = None,
    group_offset: int = 0,
) -> Tensor:
    """Multiply each group of rows by the matrix of the group.

    out[r] = lhs[r] @ rhs[g - group_offset] + bias[g - group_offset]   for the rows r of group g

    G may exceed L: rows of groups without a matrix in `rhs` are zero in the result, as are rows after the last group,
    for any values in lhs. `rhs` may be a transposed view, which is not copied.

    Args:
        lhs: ``(R, D)``, floating, rows sorted by group.
        rhs: ``(L, D, F)``, dtype of lhs, matrices of the groups.
        group_sizes: ``(G,)``, int64, number of rows of each group; their sum is at most R.
        bias: ``(L, F)``, dtype of lhs, or None.
        factors: low-rank factors beside `rhs`, of any floating dtype, computed in the dtype of lhs; or None. rhs stands
            for rhs + scale * a b, which is not formed.
        group_offset: index of the group that rhs[0] belongs to.

    Returns:
        ``(R, F)``, dtype of lhs, products.

    Source: MegaBlocks (arXiv:2211.15841); MaxText `gmm`.
    """
    if factors is not None:
        a, b = operands(factors, lhs.dtype, "factors")
        of_both: tuple[Tensor, Tensor] = torch.ops.maxmoe.gmm_low_rank(
            lhs, rhs, a, b, group_sizes, bias=bias, group_offset=group_offset
        )
        return of_both[0]
    out: Tensor = torch.ops.maxmoe.gmm(lhs, rhs, group_sizes, bias=bias, group_offset=group_offset)
    return out


@register_fake("gmm")
def _gmm_fake(lhs: Tensor, rhs: Tensor, *_: object, **__: object) -> Tensor:
    return lhs.new_empty(lhs.shape[0], rhs.shape[2])


@register_fake("gmm_low_rank")
def _gmm_low_rank_fake(lhs: Tensor, rhs: Tensor, a: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
    return lhs.new_empty(lhs.shape[0], rhs.shape[2]), lhs.new_empty(lhs.shape[0], a.shape[2])
