"""Gather of tokens to the rows of their experts."""

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake
from maxmoe.ops.ragged_plan import RaggedPlan


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
    out: Tensor = torch.ops.maxmoe.ragged_sort(x, plan.slots, plan.rows, plan.top_k, weights)
    return out


@register_fake("ragged_sort")
def _ragged_sort_fake(x: Tensor, slots: Tensor, **_: object) -> Tensor:
    return x.new_empty(slots.shape[0], x.shape[1])
