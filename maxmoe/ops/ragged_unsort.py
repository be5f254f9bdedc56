"""Rows of the experts back to their tokens."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake
from maxmoe.ops.ragged_plan import RaggedPlan


def ragged_unsort(rows: Tensor, plan: RaggedPlan, weights: Tensor | None = None) -> Tensor:
    """Sum each token's rows, weighted: the transpose of `ragged_sort`.

    out[t] = sum_k weights[t, k] * rows[plan.rows[t * K + k]]   over the slots that have a row

    Backward is `ragged_sort`: the weights are applied inside of its gather, so that nothing of the size [T * K, D] is
    made; the gradient of the weights is <d out[t], rows[row]>.

    Args:
        rows: ``(R, D)``, floating; rows past the plan's are not read.
        plan: from `ragged_plan`.
        weights: ``(T, K)``, floating, or None for ones.

    Returns:
        ``(T, D)``, dtype of rows.

    Raises:
        ValueError: for fewer rows than the plan has or another wrong argument.

    Source: MaxText `ring_ragged_unsort`, with the gradient of the weights that it drops.
    """
    out: Tensor = torch.ops.maxmoe.ragged_unsort(rows, plan.slots, plan.rows, plan.top_k, weights)
    return out


@register_fake("ragged_unsort")
def _ragged_unsort_fake(
    rows: Tensor, slots: Tensor, row_of_slot: Tensor, top_k: int, weights: Tensor | None = None
) -> Tensor:
    return rows.new_empty(row_of_slot.shape[0] // top_k, rows.shape[1])
