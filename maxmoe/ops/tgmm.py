"""Transposed grouped matrix multiplication."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake


def tgmm(lhs: Tensor, rhs: Tensor, group_sizes: Tensor, num_local_groups: int, *, group_offset: int = 0) -> Tensor:
    """Multiply the transposed rows of each group: the gradient of the matrices of `gmm`.

    out[l] = lhs_g^T @ rhs_g   over the rows of group g = l + group_offset; zero for a group without rows

    Args:
        lhs: ``(R, D)``, floating, rows sorted by group.
        rhs: ``(R, F)``, dtype of lhs, rows sorted by group.
        group_sizes: ``(G,)``, int64, number of rows of each group; their sum is at most R.
        num_local_groups: L, number of matrices of the result.
        group_offset: index of the group that out[0] belongs to.

    Returns:
        ``(L, D, F)``, dtype of lhs, products.

    Source: MaxText `tgmm`.
    """
    out: Tensor = torch.ops.maxmoe.tgmm(lhs, rhs, group_sizes, num_local_groups, group_offset=group_offset)
    return out


@register_fake("tgmm")
def _tgmm_fake(lhs: Tensor, rhs: Tensor, num_local_groups: int, **_: object) -> Tensor:
    return lhs.new_empty(num_local_groups, lhs.shape[1], rhs.shape[1])
