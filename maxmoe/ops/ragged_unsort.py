"""Weighted sums of the rows of each token."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake
from maxmoe.ops.ragged_plan import RaggedPlan


def ragged_unsort(rows: Tensor, plan: RaggedPlan, weights: Tensor | None = None) -> Tensor:
    """Compute the weighted sum of the rows of each token: the transpose of `ragged_sort`.

    out[t] = sum_k weights[t, k] * rows[plan.rows[t * K + k]]   over the slots that have a row

    The backward is `ragged_sort`, which applies the weights as it gathers, so that no tensor of shape [T * K, D] is
    allocated. The gradient of the weights is <d out[t], rows[row]>.

    Args:
        rows: ``(R, D)``, floating, rows sorted by expert; rows after those of the plan are not read.
        plan: plan from `ragged_plan`.
        weights: ``(T, K)``, floating, routing weights; None for ones.

    Returns:
        ``(T, D)``, dtype of rows, sums.

    Source: MaxText `ring_ragged_unsort`, with the gradient of the weights that it drops.
    """
    out: Tensor = torch.ops.maxmoe.ragged_unsort(rows, plan.slots, plan.rows, plan.top_k, weights)
    return out


@register_fake("ragged_unsort")
def _ragged_unsort_fake(rows: Tensor, row_of_slot: Tensor, top_k: int, **_: object) -> Tensor:
    return rows.new_empty(row_of_slot.shape[0] // top_k, rows.shape[1])
