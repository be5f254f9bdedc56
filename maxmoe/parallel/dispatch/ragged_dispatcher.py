"""Ragged all-to-all: every routed row is sent to the rank of its expert, and its output is sent back.

Shapes: T tokens of this rank, K top_k, D hidden_size, P ranks that share the experts, E experts in the order of these
ranks, S rows that this rank sends, R rows that it receives.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from maxmoe.nn.dispatcher import Dispatcher, Future
from maxmoe.nn.local_dispatcher import LocalCounts
from maxmoe.nn.routing import TopK
from maxmoe.nn.windows import Window, Windows, before, rows_within
from maxmoe.ops import RaggedPlan, ragged_gather, ragged_sort, ragged_unsort
from maxmoe.parallel.dispatch.collectives import all_gather_counts, ragged_all_to_all
from maxmoe.parallel.dispatch.computed_rows import ComputedRows
from maxmoe.parallel.dispatch.expert_ranks import ExpertLayout, ExpertRanks, rows_to_send, with_rows
from maxmoe.parallel.dispatch.strategy import OUTPUTS, TOKENS, WEIGHTS, Received, Strategy
from maxmoe.recompute.freed_storage import Recomputation


class RaggedCounts(NamedTuple):
    """Counts of a chunk.

    Attributes:
        plan: plan of this rank's rows, sorted by the rank of their expert and by expert.
        rows: ``(P, E)``, int64, number of rows of each rank for each expert.
        host_rows: `rows` on the host.
        facts: ``(P, n)``, int64 on the host, numbers that each rank has added to its counts: first its number of slots.
        moved: rows by the rank that computes them, if experts move.
        window: rows of each rank that are computed; None for all rows.
    """

    plan: RaggedPlan
    rows: Tensor
    host_rows: Tensor
    facts: Tensor
    moved: ComputedRows | None = None
    window: Window | None = None


class Splits(NamedTuple):
    """Numbers of rows that this rank sends to each rank and receives from it.

    Attributes:
        routed: number of rows for each rank, also those that are not sent.
        send: number of rows that are sent to each rank.
        receive: number of rows that are received from each rank.
        skip: number of rows for each rank before those that are sent.
    """

    routed: list[int]
    send: list[int]
    receive: list[int]
    skip: list[int]

    def sent_part(self, plan: RaggedPlan) -> RaggedPlan:
        """Return the plan of the rows that are sent, given the plan of all rows; its `dropped` counts the others."""
        if self.send == self.routed:
            return plan
        kept = rows_to_send(self.routed, self.skip, self.send).to(plan.slots.device)
        return with_rows(plan, kept)._replace(dropped=plan.dropped + (sum(self.routed) - sum(self.send)))


def splits_of(matrix: Tensor, rank: int, window: Window | None = None) -> Splits:
    """Compute the splits of a rank from the rows ``(P, P)`` of each rank (first dim) for the experts of each rank.

    A rank receives its rows in the window, in the order of the sending ranks.

    Source: MaxText, `get_all_to_all_params` and its `ragged_buffer_factor`, for the first window.
    """
    accepted, skipped = rows_within(matrix, window), rows_within(matrix, before(window))
    lists = (matrix[rank], accepted[rank], accepted[:, rank], skipped[rank])
    return Splits(*(counts.tolist() for counts in lists))


# The plan by which this rank has sorted the rows that it sends, and the splits of the all-to-all.
SentRows: TypeAlias = tuple[RaggedPlan, Splits]


@dataclass(frozen=True)
class RaggedAllToAll(Strategy):
    """All-to-all of the routed rows with their weights, and of the weighted outputs back.

    1. Plan: a counting sort of the T * K slots by the rank of their expert, and by expert.
    2. Counts: an all-gather of the row counts, once for all chunks, from which every rank computes its splits.
    3. Sort: tokens ``(T, D)`` become rows ``(S, D)`` in the order of the plan, S the sum of the rows to send.
    4. All-to-all: rows ``(S, D)`` and weights ``(S, 1)`` become ``(R, D)``, ``(R, 1)``, R the rows that are received.
    5. The local dispatcher sorts the received rows by expert. The experts compute and weight them: ``(R, D)``.
    6. All-to-all in the opposite direction: ``(R, D)`` to ``(S, D)``.
    7. Unsort: each token sums its K rows, ``(T, D)``. Nothing of size ``(T, K, D)`` is saved for the backward.

    If a buffer has several windows of rows, each takes the steps 3 to 7.

    Args:
        local: dispatcher to the experts of this rank, with K = 1, which drops no rows.
        ranks: the ranks that share the experts.

    Source: MaxText, `ragged_all_to_all`; torchtitan and Megatron-LM "alltoall".
    """

    local: Dispatcher[Any, LocalCounts]
    ranks: ExpertRanks

    @classmethod
    def dispatcher(cls, layout: ExpertLayout) -> "RaggedAllToAll":
        """Make the dispatcher of this process."""
        return cls(layout.local_dispatcher(is_bounded=False), layout.ranks())

    def exchange_counts(
        self, chunks: Sequence[TopK], num_sequences: int, dtype: torch.dtype
    ) -> Sequence[RaggedCounts | Windows[RaggedCounts]]:
        """Sort the slots and all-gather the number of rows for every expert: steps 1 and 2."""
        counts, buffer = self._gather_counts(chunks, dtype), self.ranks.buffer
        if buffer is None:
            return counts
        means = [self.ranks.experts.mean_rows(int(each.facts[:, 0].sum())) for each in counts]
        if buffer.drops:
            return [
                each._replace(window=Window(0, buffer.size(mean))) for each, mean in zip(counts, means, strict=True)
            ]
        rows = [max(self._loads(each)) for each in counts]
        return buffer.in_windows(counts, rows, means, chunks[0].experts.device)

    def _gather_counts(self, chunks: Sequence[TopK], dtype: torch.dtype) -> list[RaggedCounts]:
        plans = [self.ranks.plan(chunk) for chunk in chunks]
        counts = [
            torch.cat([plan.group_sizes, plan.group_sizes.new_tensor(self._facts(chunk, dtype))])
            for plan, chunk in zip(plans, chunks, strict=True)
        ]
        num_experts = self.ranks.size * self.ranks.experts.count
        device, host = (
            gathered.tensor_split(len(plans), dim=1)
            for gathered in all_gather_counts(torch.cat(counts), self.ranks.group.group_name)
        )
        return [
            RaggedCounts(plan, rows[:, :num_experts], host_rows[:, :num_experts], host_rows[:, num_experts:])
            for plan, rows, host_rows in zip(plans, device, host, strict=True)
        ]

    def _matrix(self, counts: RaggedCounts) -> Tensor:
        """Return the number of rows ``(P, P)`` of each rank (first dim) for the experts of each rank."""
        return counts.host_rows.reshape(self.ranks.size, self.ranks.size, self.ranks.experts.count).sum(2)

    def _loads(self, counts: RaggedCounts) -> list[int]:
        """Return the number of rows that each rank computes."""
        loads: list[int] = self._matrix(counts).sum(0).tolist()
        return loads

    def dispatch(self, x: Tensor, top_k: TopK, counts: RaggedCounts) -> Future[Received[SentRows]]:
        """Start the all-to-all of the rows of x ``(T, D)`` to the ranks of their experts: steps 3 to 5."""
        splits = splits_of(self._matrix(counts), self.ranks.group.rank(), counts.window)
        sent, expert_ids = (splits.sent_part(counts.plan), splits), self._expert_ids(counts, sum(splits.receive))
        return self.send(x, top_k, sent, expert_ids, self.local)

    def send(
        self, x: Tensor, top_k: TopK, sent: SentRows, expert_ids: Tensor, local: Dispatcher[Any, LocalCounts]
    ) -> Future[Received[SentRows]]:
        """Start the all-to-all of rows and of their weights, which `local` dispatches to `expert_ids` ``(R, 1)``."""
        plan, splits = sent
        rows = self._sent(ragged_sort(x, plan), splits, TOKENS)
        weights = self._sent(ragged_gather(top_k.weights.reshape(-1, 1), plan.slots), splits, WEIGHTS)

        def arrive() -> Received[SentRows]:
            arrived = rows()
            again = Recomputation(arrived, lambda x: self._sent(ragged_sort(x(), plan), splits, TOKENS))
            dispatched = local.dispatch(arrived, TopK(weights(), expert_ids), LocalCounts(1))()
            return Received.of(dispatched, again, plan.dropped, sent)

        return arrive

    def combine(self, outputs: Tensor, dispatched: Received[SentRows]) -> Future[Tensor]:
        """Start the all-to-all of the outputs back to the ranks of their tokens: steps 6 and 7."""
        plan, splits = dispatched.sent
        weighted = self.local.combine(outputs, dispatched.local)()
        rows = ragged_all_to_all(weighted, splits.receive, splits.send, self.ranks.group, OUTPUTS)
        return lambda: ragged_unsort(rows(), plan)

    def _sent(self, rows: Tensor, splits: Splits, what: str) -> Future[Tensor]:
        return ragged_all_to_all(rows, splits.send, splits.receive, self.ranks.group, what)

    def _facts(self, chunk: TopK, dtype: torch.dtype) -> list[int]:
        """Return the numbers that are exchanged with the row counts of a chunk."""
        return [chunk.experts.numel()]

    def _expert_ids(self, counts: RaggedCounts, num_rows: int) -> Tensor:
        """Return the expert ``(R, 1)`` of each received row: the rows of a rank are in the order of their experts."""
        experts = self.ranks.experts
        first = self.ranks.group.rank() * experts.count
        lengths = rows_within(counts.rows[:, first : first + experts.count].flatten(), counts.window)
        ids = torch.arange(experts.count, device=lengths.device) + experts.first
        return ids.repeat(self.ranks.size).repeat_interleave(lengths, output_size=num_rows).unsqueeze(1)
