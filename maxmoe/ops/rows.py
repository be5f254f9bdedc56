"""Operators that move rows by index, or by a plan of `ragged_plan`."""

import torch
from torch import Tensor

from maxmoe import _C
from maxmoe.ops.routing import RaggedPlan


def ragged_gather(
    x: Tensor, index: Tensor, weights: Tensor | None = None, *, start: int = 0, end: int | None = None
) -> Tensor:
    """Gather rows by index and scale them.

    out[i] = weights[i] * x[index[i]]   for start <= i < end and index[i] >= 0, else 0

    The transpose is `ragged_scatter_add`; if no index is repeated, `ragged_gather_reduce` with the inverse index.

    Args:
        x: ``(N, D)``, floating, rows.
        index: ``(M,)``, int64, row of x for each row of the result, in [-1, N).
        weights: ``(M,)``, floating, factor of each row of the result; None for ones.
        start: first row of the result that is gathered; earlier rows are zero.
        end: end of the rows that are gathered; later rows are zero; None for M.

    Returns:
        ``(M, D)``, dtype of x, gathered rows.

    Source: MaxText `ragged_gather`.
    """
    if not torch.compiler.is_compiling():
        return _C.ragged_gather(x, index, weights, start, end)
    out: Tensor = torch.ops.maxmoe.ragged_gather(x, index, weights, start=start, end=end)
    return out


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
    if not torch.compiler.is_compiling():
        return _C.ragged_gather_reduce(rows, index, group_size, weights, valid)
    out: Tensor = torch.ops.maxmoe.ragged_gather_reduce(rows, index, group_size, weights, valid=valid)
    return out


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
    if not torch.compiler.is_compiling():
        return _C.ragged_scatter_add(rows, index, num_rows, group_size, weights)
    out: Tensor = torch.ops.maxmoe.ragged_scatter_add(rows, index, num_rows, group_size, weights)
    return out


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
    if not torch.compiler.is_compiling():
        return _C.ragged_dot(a, b, index, group_size)
    out: Tensor = torch.ops.maxmoe.ragged_dot(a, b, index, group_size)
    return out


def ragged_sort(x: Tensor, plan: RaggedPlan, weights: Tensor | None = None) -> Tensor:
    """Copy each token to the rows of its experts, scaled.

    rows[r] = weights[plan.slots[r]] * x[plan.slots[r] // K]

    The backward is `ragged_unsort`, which gathers instead of scattering.

    Args:
        x: ``(T, D)``, floating, tokens.
        plan: plan from `ragged_plan`.
        weights: ``(T, K)``, floating, routing weights; None for ones.

    Returns:
        ``(R, D)``, dtype of x, rows sorted by expert.

    Source: MaxText `ring_ragged_sort`.
    """
    if not torch.compiler.is_compiling():
        return _C.ragged_sort(x, plan, weights)
    out: Tensor = torch.ops.maxmoe.ragged_sort(x, plan.slots, plan.rows, plan.top_k, weights)
    return out


def ragged_unsort(rows: Tensor, plan: RaggedPlan, weights: Tensor | None = None) -> Tensor:
    """Compute the weighted sum of the rows of each token: the transpose of `ragged_sort`.

    out[t] = sum_k weights[t, k] * rows[plan.rows[t * K + k]]   over the slots that have a row

    The backward is `ragged_sort`, which applies the weights as it gathers, so that no tensor of shape [T * K, D] is
    allocated. The gradient of the weights is <d out[t], rows[row]>.

    Args:
        rows: ``(R, D)``, floating, rows sorted by expert; rows after the rows of the plan are not read.
        plan: plan from `ragged_plan`.
        weights: ``(T, K)``, floating, routing weights; None for ones.

    Returns:
        ``(T, D)``, dtype of rows, sums.

    Source: MaxText `ring_ragged_unsort`, with the gradient of the weights that it drops.
    """
    if not torch.compiler.is_compiling():
        return _C.ragged_unsort(rows, plan, weights)
    out: Tensor = torch.ops.maxmoe.ragged_unsort(rows, plan.slots, plan.rows, plan.top_k, weights)
    return out
