"""Grouped matrix multiplication."""

from typing import Any

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake
from maxmoe.ops._projection import ProjectionLike, as_projection, out_size


def gmm(lhs: Tensor, rhs: ProjectionLike, group_sizes: Tensor, *, group_offset: int = 0) -> Tensor:
    """Multiply each group of rows by the matrix of the group.

    out[r] = rhs_l(lhs[r])   for the rows r of group g, with l = g - group_offset and the projection
    rhs_l(x) = x (W_l + scale * a_l b_l) + bias_l

    G may exceed L: rows of groups without a matrix in `rhs` are zero in the result, as are rows after the last group,
    for any values in lhs. Weights may be a transposed view, which is not copied.

    Args:
        lhs: ``(R, D)``, floating, rows sorted by group.
        rhs: ``(L, D, F)``, dtype of lhs: a `Projection`, or its weights alone.
        group_sizes: ``(G,)``, int64, number of rows of each group; their sum is at most R.
        group_offset: index of the group that rhs[0] belongs to.

    Returns:
        ``(R, F)``, dtype of lhs, products.

    Source: MegaBlocks (arXiv:2211.15841); MaxText `gmm`.
    """
    # Weights alone need no Projection: with four rows, that and the search for an overload are a sixth of the time.
    arguments = {"rhs": rhs} if isinstance(rhs, Tensor) else as_projection(rhs).arguments("rhs", lhs.dtype)
    out: Tensor = torch.ops.maxmoe.gmm.default(lhs, group_sizes, **arguments, group_offset=group_offset)
    return out


@register_fake("gmm")
def _gmm_fake(lhs: Tensor, **others: Any) -> Tensor:
    return lhs.new_empty(lhs.shape[0], out_size("rhs", others))
