"""Ragged all-to-all: every routed row goes to the rank of its expert, and its output comes back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from maxmoe.dispatch.collectives import ragged_all_to_all
from maxmoe.dispatch.counts import all_gather_counts
from maxmoe.nn.dispatcher import Dispatched, Dispatcher, LocalExperts, Pending
from maxmoe.nn.router import Assignment
from maxmoe.ops import RaggedPlan, ragged_gather, ragged_plan, ragged_sort, ragged_unsort


class Splits(NamedTuple):
    """How many rows this rank exchanges with every rank.

    Attributes:
        routed: its rows for each rank, those that are dropped included.
        send: its rows that reach each rank.
        receive: the rows of each rank that reach this one.
    """

    routed: list[int]
    send: list[int]
    receive: list[int]


def splits_of(matrix: Tensor, rank: int, max_rows: int | None = None) -> Splits:
    """Find the splits of a rank.

    Where a rank would get more than `max_rows`, the first ranks fill them, and the last rows of the others are dropped.

    Args:
        matrix: ``(P, P)``, int64 on the host: rows of each rank (first dim) for the experts of each rank.
        rank: of the group.
        max_rows: that a rank takes; None for all.

    Returns:
        The splits.

    Source: MaxText, `get_all_to_all_params` and its `ragged_buffer_factor`.
    """
    accepted = matrix
    if max_rows is not None:
        filled = matrix.cumsum(0).clamp_max(max_rows)
        accepted = filled.diff(dim=0, prepend=filled.new_zeros(1, filled.shape[1]))
    return Splits(matrix[rank].tolist(), accepted[rank].tolist(), accepted[:, rank].tolist())


class RaggedState(NamedTuple):
    """Of `RaggedAllToAll`: what the local dispatcher made of the rows, their splits, and the plan that sorted them."""

    local: Dispatched
    splits: Splits
    plan: RaggedPlan


@dataclass(frozen=True)
class RaggedAllToAll:
    """All-to-all of the routed rows with their weights, and of the weighted outputs back.

    Args:
        local: to the experts of this rank.
        experts: those of this rank.
        group: the ranks that share the experts.
        first_experts: of each rank of the group, the first of its experts; all have as many.
        buffer_factor: bounds the rows of a rank by this multiple of the mean over the ranks; None for no bound.

    Source: MaxText, `ragged_all_to_all`; torchtitan and Megatron-LM "alltoall".
    """

    local: Dispatcher
    experts: LocalExperts
    group: dist.ProcessGroup
    first_experts: tuple[int, ...]
    buffer_factor: float | None = None

    def dispatch(self, x: Tensor, assignment: Assignment, num_sequences: int) -> Pending[Dispatched]:
        """See `Dispatcher`."""
        plan = self._plan(assignment)
        counts, host_counts = self._gathered_counts(plan, assignment.experts.numel())
        splits = self._splits(host_counts)
        kept = plan if splits.send == splits.routed else _truncated(plan, splits)
        rows = ragged_all_to_all(ragged_sort(x, kept), splits.send, splits.receive, self.group)
        row_weights = ragged_gather(assignment.weights.reshape(-1, 1), kept.slots)
        weights = ragged_all_to_all(row_weights, splits.send, splits.receive, self.group)

        def arrive() -> Dispatched:
            arrived = Assignment(weights(), self._expert_ids(counts, splits.receive))
            dispatched = self.local.dispatch(rows(), arrived, num_sequences)()
            return dispatched._replace(dropped=kept.dropped, state=RaggedState(dispatched, splits, kept))

        return arrive

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        """See `Dispatcher`."""
        state: RaggedState = dispatched.state
        weighted = self.local.combine(outputs, state.local)()
        rows = ragged_all_to_all(weighted, state.splits.receive, state.splits.send, self.group)
        return lambda: ragged_unsort(rows(), state.plan)

    def _plan(self, assignment: Assignment) -> RaggedPlan:
        """Sort the slots by the rank of their expert, and by expert."""
        experts, count, total = assignment.experts, self.experts.count, self.experts.total
        num_rows = experts.numel() if assignment.is_complete and len(self.first_experts) * count == total else None
        if self.first_experts != tuple(range(0, total, count)):
            experts = self._position_of_expert(experts.device)[experts]
        return ragged_plan(experts, len(self.first_experts) * count, num_rows=num_rows)

    def _position_of_expert(self, device: torch.device) -> Tensor:
        """Return the place of each expert in the order of the group, -1 for one elsewhere, and at the end for none."""
        position = torch.full((self.experts.total + 1,), -1, device=device)
        for rank, first in enumerate(self.first_experts):
            position[first : first + self.experts.count] = torch.arange(self.experts.count) + rank * self.experts.count
        return position

    def _gathered_counts(self, plan: RaggedPlan, num_slots: int) -> tuple[Tensor, Tensor]:
        """Gather the rows of every rank for every expert, and its slots, on the device and on the host."""
        counts = torch.cat([plan.group_sizes, plan.group_sizes.new_tensor([num_slots])])
        gathered, host = all_gather_counts(counts, self.group.group_name)
        return gathered, host

    def _splits(self, counts: Tensor) -> Splits:
        num_ranks = len(self.first_experts)
        matrix = counts[:, :-1].view(num_ranks, num_ranks, self.experts.count).sum(2)
        max_rows = None
        if self.buffer_factor is not None:
            max_rows = int(int(counts[:, -1].sum()) // num_ranks * self.buffer_factor)
        return splits_of(matrix, self.group.rank(), max_rows)

    def _expert_ids(self, counts: Tensor, receive: Sequence[int]) -> Tensor:
        """Return the expert ``(R, 1)`` of each row that came: the rows of a rank are in the order of their experts."""
        first = self.group.rank() * self.experts.count
        ends = counts[:, first : first + self.experts.count].cumsum(1)
        ends = ends.clamp_max(torch.tensor(receive, device=counts.device).unsqueeze(1))
        lengths = ends.diff(dim=1, prepend=ends.new_zeros(len(receive), 1)).flatten()
        ids = torch.arange(self.experts.count, device=counts.device) + self.experts.first
        return ids.repeat(len(receive)).repeat_interleave(lengths, output_size=sum(receive)).unsqueeze(1)


def _truncated(plan: RaggedPlan, splits: Splits) -> RaggedPlan:
    """Leave out the last rows for each rank that do not reach it."""
    starts = torch.tensor([0, *splits.routed[:-1]]).cumsum(0).tolist()
    kept = torch.cat([torch.arange(start, start + count) for start, count in zip(starts, splits.send, strict=True)])
    slots = plan.slots[kept.to(plan.slots.device)]
    rows = torch.full_like(plan.rows, -1).scatter(0, slots, torch.arange(len(slots), device=slots.device))
    return plan._replace(slots=slots, rows=rows, dropped=plan.dropped + (sum(splits.routed) - sum(splits.send)))
