"""Matrix products: of a router, and of groups of rows."""

import torch
from torch import Tensor

from maxmoe import _C
from maxmoe.ops._projection import ProjectionLike, as_projection


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None) -> Tensor:
    """Apply a linear map, accumulated in float32, or in float64 if x or weight is float64.

    out[t, e] = <x[t], weight[e]> + bias[e]

    For the logits of a router. Only the result is rounded; x and weight are neither converted to another dtype nor
    saved in one. Gradients are computed in the same way and rounded once, to the dtype of their argument. Autocast has
    no effect. out[t] is bitwise independent of the other rows.

    Args:
        x: ``(T, D)``, floating, input.
        weight: ``(E, D)``, floating.
        bias: ``(E,)``, floating, or None.
        out_dtype: floating dtype of the result; None for the dtype of the accumulation.

    Returns:
        ``(T, E)``, `out_dtype`, output.
    """
    if not torch.compiler.is_compiling():
        return _C.linear(x, weight, bias, out_dtype)
    out: Tensor = torch.ops.maxmoe.linear(x, weight, bias, out_dtype=out_dtype)
    return out


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
    if not torch.compiler.is_compiling():
        return _C.gmm(lhs, rhs, group_sizes, group_offset)
    arguments = as_projection(rhs).arguments("rhs", lhs.dtype)
    out: Tensor = torch.ops.maxmoe.gmm(lhs, group_sizes, **arguments, group_offset=group_offset)
    return out


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
    if not torch.compiler.is_compiling():
        return _C.tgmm(lhs, rhs, group_sizes, num_local_groups, group_offset)
    out: Tensor = torch.ops.maxmoe.tgmm(lhs, rhs, group_sizes, num_local_groups, group_offset=group_offset)
    return out
