"""Ragged all-to-all: every routed row goes to the rank of its expert, and its output comes back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from maxmoe.dispatch.collectives import all_gather_replicated_rows, ragged_all_to_all
from maxmoe.dispatch.expert_ranks import ExpertRanks, without_last_rows
from maxmoe.dispatch.row_counts import all_gather_counts
from maxmoe.nn.dispatcher import Dispatched, Dispatcher, Pending
from maxmoe.nn.freed_storage import Recomputation
from maxmoe.nn.router import Assignment
from maxmoe.ops import RaggedPlan, ragged_gather, ragged_sort, ragged_unsort


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
        ranks: that share the experts.

    Source: MaxText, `ragged_all_to_all`; torchtitan and Megatron-LM "alltoall".
    """

    local: Dispatcher
    ranks: ExpertRanks

    def dispatch(self, x: Tensor, assignment: Assignment, num_sequences: int) -> Pending[Dispatched]:
        """See `Dispatcher`."""
        plan = self.ranks.plan(assignment)
        counts, host_counts = self._gathered_counts(plan, assignment.experts.numel())
        splits = self._splits(host_counts)
        plan = without_last_rows(plan, splits.routed, splits.send)
        rows = self._sent(ragged_sort(x, plan), splits)
        weights = self._sent(_weights_of_rows(assignment.weights, plan.slots), splits)

        def arrive() -> Dispatched:
            arrived, assigned = rows(), Assignment(weights(), self._expert_ids(counts, splits.receive))
            dispatched = self.local.dispatch(arrived, assigned, num_sequences)()
            again = Recomputation(arrived, lambda x: self._sent(ragged_sort(x(), plan), splits))
            return dispatched._replace(
                dropped=plan.dropped,
                state=RaggedState(dispatched, splits, plan),
                recomputations=(again, *dispatched.recomputations),
            )

        return arrive

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        """See `Dispatcher`."""
        state: RaggedState = dispatched.state
        weighted = self.local.combine(outputs, state.local)()
        rows = ragged_all_to_all(weighted, state.splits.receive, state.splits.send, self.ranks.group)
        return lambda: ragged_unsort(rows(), state.plan)

    def _sent(self, rows: Tensor, splits: Splits) -> Pending[Tensor]:
        return ragged_all_to_all(rows, splits.send, splits.receive, self.ranks.group)

    def _gathered_counts(self, plan: RaggedPlan, num_slots: int) -> tuple[Tensor, Tensor]:
        """Gather the rows of every rank for every expert, and its slots, on the device and on the host."""
        counts = torch.cat([plan.group_sizes, plan.group_sizes.new_tensor([num_slots])])
        gathered, host = all_gather_counts(counts, self.ranks.group.group_name)
        return gathered, host

    def _splits(self, counts: Tensor) -> Splits:
        matrix = counts[:, :-1].view(self.ranks.size, self.ranks.size, self.ranks.experts.count).sum(2)
        max_rows = self.ranks.experts.max_rows(int(counts[:, -1].sum()), self.ranks.buffer_factor)
        return splits_of(matrix, self.ranks.group.rank(), max_rows)

    def _expert_ids(self, counts: Tensor, receive: Sequence[int]) -> Tensor:
        """Return the expert ``(R, 1)`` of each row that came: the rows of a rank are in the order of their experts."""
        experts = self.ranks.experts
        first = self.ranks.group.rank() * experts.count
        ends = counts[:, first : first + experts.count].cumsum(1)
        ends = ends.clamp_max(torch.tensor(receive, device=counts.device).unsqueeze(1))
        lengths = ends.diff(dim=1, prepend=ends.new_zeros(len(receive), 1)).flatten()
        ids = torch.arange(experts.count, device=counts.device) + experts.first
        return ids.repeat(len(receive)).repeat_interleave(lengths, output_size=sum(receive)).unsqueeze(1)


class ReplicatedState(NamedTuple):
    """Of `RaggedAllGather`: what the local dispatcher made of the rows, those of each rank, and the plan of all."""

    local: Dispatched
    counts: list[int]
    plan: RaggedPlan


@dataclass(frozen=True)
class RaggedAllGather:
    """The form for tokens that every rank holds: each computes the rows of its experts, and all get the outputs.

    Args:
        local: to the experts of this rank.
        ranks: that share the experts, and hold the same tokens.

    Source: MaxText, `ragged_all_to_all` with a replicated batch.
    """

    local: Dispatcher
    ranks: ExpertRanks

    def dispatch(self, x: Tensor, assignment: Assignment, num_sequences: int) -> Pending[Dispatched]:
        """See `Dispatcher`."""
        plan = self.ranks.plan(assignment)
        routed = self._routed(plan)
        max_rows = self.ranks.experts.max_rows(assignment.experts.numel(), self.ranks.buffer_factor)
        counts: list[int] = (routed if max_rows is None else routed.clamp_max(max_rows)).tolist()
        plan = without_last_rows(plan, routed.tolist(), counts)
        first = sum(counts[: self.ranks.group.rank()])
        slots = plan.slots[first : first + counts[self.ranks.group.rank()]]
        ids = assignment.experts.reshape(-1, 1)[slots]
        weights = _weights_of_rows(assignment.weights, slots)
        rows = ragged_gather(x, slots // plan.top_k)
        dispatched = self.local.dispatch(rows, Assignment(weights, ids), num_sequences)()
        again = Recomputation(rows, lambda x: lambda: ragged_gather(x(), slots // plan.top_k))
        dispatched = dispatched._replace(
            dropped=plan.dropped,
            state=ReplicatedState(dispatched, counts, plan),
            recomputations=(again, *dispatched.recomputations),
        )
        return lambda: dispatched

    def _routed(self, plan: RaggedPlan) -> Tensor:
        """Count the rows of each rank, and check that all have routed alike: each knows the others' rows by its own."""
        place = torch.arange(1, len(plan.slots) + 1, device=plan.slots.device)
        checksum = (plan.slots * place).sum().view(1)  # wraps around, on all ranks alike
        _, host = all_gather_counts(torch.cat([plan.group_sizes, checksum]), self.ranks.group.group_name)
        if not host.eq(host[0]).all():
            raise RuntimeError(
                "ragged_all_to_all: ranks that hold the same tokens must route them alike, got other experts on some: "
                "give them the same tokens and seeds"
            )
        routed: Tensor = host[0, :-1].view(self.ranks.size, -1).sum(1)
        return routed

    def combine(self, outputs: Tensor, dispatched: Dispatched) -> Pending[Tensor]:
        """See `Dispatcher`."""
        state: ReplicatedState = dispatched.state
        weighted = self.local.combine(outputs, state.local)()
        rows = all_gather_replicated_rows(weighted, state.counts, self.ranks.group)
        return lambda: ragged_unsort(rows(), state.plan)


def _weights_of_rows(weights: Tensor, slots: Tensor) -> Tensor:
    """Return the routing weight ``(R, 1)`` of every row, given its slot."""
    return ragged_gather(weights.reshape(-1, 1), slots)
