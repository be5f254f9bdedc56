"""Which row each routed slot gets."""

from typing import NamedTuple

import torch
from torch import Tensor

from maxmoe.ops._fake import register_fake


class RaggedPlan(NamedTuple):
    """The rows of the slots that are routed to local experts. A slot is one (token, k) pair, index t * K + k.

    Attributes:
        slots: ``(R,)``, int64; the slot of each row, ordered by expert, then slot; -1 for a row of nobody, which only
            other devices than the CPU have, after all others.
        rows: ``(T * K,)``, int64; the row of each slot, -1 for a slot without one.
        group_sizes: ``(L,)``, int64; rows of each local expert, sum R without the rows of nobody.
        dropped: ``()``, int64; local slots past `max_rows`.
        top_k: K.
    """

    slots: Tensor
    rows: Tensor
    group_sizes: Tensor
    dropped: Tensor
    top_k: int

    @classmethod
    def of_sorted_rows(cls, num_rows: int, group_sizes: Tensor) -> "RaggedPlan":
        """Return the plan of rows that are in the order of their experts already, each a token with K = 1.

        Args:
            num_rows: R.
            group_sizes: ``(L,)``, int64, sum R.

        Returns:
            The plan; row i is that of slot i.
        """
        order = torch.arange(num_rows, device=group_sizes.device)
        return cls(order, order, group_sizes, group_sizes.new_zeros(()), 1)


def ragged_plan(
    experts: Tensor,
    num_experts: int,
    *,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    max_rows: int | None = None,
    num_rows: int | None = None,
) -> RaggedPlan:
    """Order the slots by expert: one stable counting sort, O(T * K + E), integers only.

    Covers the slots with an expert in [first_expert, first_expert + num_local_experts). Rows are packed from 0, so
    that all that follows costs O(R), however many slots belong to others.

    Args:
        experts: ``(T, K)``, int64, each in [0, num_experts), or -1 for a slot that is not routed.
        num_experts: E.
        first_expert: the first local expert.
        num_local_experts: L; None for all from `first_expert` on.
        max_rows: keep at most this many rows; the slots past them are counted in `dropped`. On other devices than the
            CPU it is the number of rows too, T * K at most, so that nothing waits for the count: the last ones may be
            of nobody.
        num_rows: R, where the caller knows it (T * K when every slot has a local expert): keeps the shapes static
            under torch.compile, and saves other devices from waiting for the count. There it may be larger.

    Returns:
        The plan.

    Raises:
        ValueError: for an expert out of range, a wrong `num_rows` or another wrong argument.

    Source: MaxText `ring_ragged_sort`, in one sort instead of two.
    """
    slots, rows, group_sizes, dropped = torch.ops.maxmoe.ragged_plan(
        experts,
        num_experts,
        first_expert=first_expert,
        num_local_experts=num_local_experts,
        max_rows=max_rows,
        num_rows=num_rows,
    )
    return RaggedPlan(slots, rows, group_sizes, dropped, experts.shape[1])


@register_fake("ragged_plan")
def _ragged_plan_fake(
    experts: Tensor,
    num_experts: int,
    *,
    first_expert: int = 0,
    num_local_experts: int | None = None,
    max_rows: int | None = None,
    num_rows: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    num_groups = num_experts - first_expert if num_local_experts is None else num_local_experts
    if num_rows is None and max_rows is not None and experts.device.type != "cpu":
        num_rows = min(max_rows, experts.numel())
    size = torch.library.get_ctx().new_dynamic_size() if num_rows is None else num_rows
    return (
        experts.new_empty(size),
        experts.new_empty(experts.shape[0] * experts.shape[1]),
        experts.new_empty(num_groups),
        experts.new_empty(()),
    )
