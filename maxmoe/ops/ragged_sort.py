"""Tokens to the rows of their experts."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake
from maxmoe.ops.ragged_plan import RaggedPlan


def ragged_sort(x: Tensor, plan: RaggedPlan, weights: Tensor | None = None) -> Tensor:
    """Copy each token to the rows of the experts that it is routed to.

    rows[r] = weights[plan.slots[r]] * x[plan.slots[r] // K]

    Backward is `ragged_unsort`, a gather, not a scatter.

    Args:
        x: ``(T, D)``, floating.
        plan: from `ragged_plan`.
        weights: ``(T, K)``, floating, or None for ones.

    Returns:
        ``(R, D)``, dtype of x.

    Raises:
        ValueError: for a plan of another number of tokens or another wrong argument.

    Source: MaxText `ring_ragged_sort`.
    """
    out: Tensor = torch.ops.maxmoe.ragged_sort(x, plan.slots, plan.rows, plan.top_k, weights)
    return out


@register_fake("ragged_sort")
def _ragged_sort_fake(x: Tensor, slots: Tensor, rows: Tensor, top_k: int, weights: Tensor | None = None) -> Tensor:
    return x.new_empty(slots.shape[0], x.shape[1])
