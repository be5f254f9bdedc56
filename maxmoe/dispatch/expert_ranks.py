"""Which rank has which experts, and the order of rows that follows from it."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.nn.dispatcher import LocalExperts
from maxmoe.nn.router import TopK
from maxmoe.ops import RaggedPlan, ragged_gather, ragged_plan


@dataclass(frozen=True)
class ExpertRanks:
    """The ranks that share the experts of a layer; each holds the same number of them.

    Args:
        group: the ranks.
        experts: the experts of this rank.
        first_experts: index of the first expert of each rank of the group.
        buffer_factor: bounds the rows of a rank by this multiple of the mean over the ranks; None for no bound.
    """

    group: dist.ProcessGroup
    experts: LocalExperts
    first_experts: tuple[int, ...]
    buffer_factor: float | None = None

    def __deepcopy__(self, _memo: object) -> "ExpertRanks":
        """Copies of a layer share the group, which cannot be copied."""
        return self

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.first_experts)

    def plan(self, top_k: TopK) -> RaggedPlan:
        """Sort the slots by the rank of their expert, and by expert; those of no rank of the group have no row.

        Args:
            top_k: expert ids and weights of the tokens.

        Returns:
            The plan, whose groups are the experts in the order of the ranks.
        """
        experts, count, total = top_k.experts, self.experts.count, self.experts.total
        num_rows = experts.numel() if top_k.is_unpadded and self.size * count == total else None
        if self.first_experts != tuple(range(0, total, count)):
            experts = self._position_of_expert(experts.device)[experts]
        return ragged_plan(experts, self.size * count, num_rows=num_rows)

    def _position_of_expert(self, device: torch.device) -> Tensor:
        """Return the place of each expert in the order of the ranks, -1 for one elsewhere, and at the end for none."""
        position = torch.full((self.experts.total + 1,), -1, device=device)
        for rank, first in enumerate(self.first_experts):
            position[first : first + self.experts.count] = torch.arange(self.experts.count) + rank * self.experts.count
        return position


def without_last_rows(plan: RaggedPlan, routed: list[int], kept: list[int]) -> RaggedPlan:
    """Drop the last rows of ranks that take no more.

    Args:
        plan: from `ExpertRanks.plan`.
        routed: its rows for each rank.
        kept: how many of them the rank takes.

    Returns:
        The plan of the other rows; `group_sizes` are still those before.
    """
    if kept == routed:
        return plan
    starts = torch.tensor([0, *routed[:-1]]).cumsum(0).tolist()
    rows_kept = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, kept, strict=True)])
    slots = plan.slots[rows_kept.to(plan.slots.device)]
    rows = torch.full_like(plan.rows, -1).scatter(0, slots, torch.arange(len(slots), device=slots.device))
    return plan._replace(slots=slots, rows=rows, dropped=plan.dropped + (sum(routed) - sum(kept)))


def weights_of_rows(weights: Tensor, slots: Tensor) -> Tensor:
    """Return the routing weight ``(R, 1)`` of every row, given its slot."""
    return ragged_gather(weights.reshape(-1, 1), slots)
