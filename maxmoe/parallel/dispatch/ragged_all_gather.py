"""Ragged all-gather: ranks that hold the same tokens compute the rows of their experts, and gather all outputs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from maxmoe.declaration import SavedTensor
from maxmoe.nn.dispatcher import Dispatched, Dispatcher, Future
from maxmoe.nn.routing import TopK
from maxmoe.ops import RaggedPlan, ragged_gather, ragged_unsort
from maxmoe.parallel.dispatch.collectives import all_gather_counts, all_gather_replicated_rows
from maxmoe.parallel.dispatch.expert_ranks import ExpertLayout, ExpertRanks, weights_of_rows, without_last_rows
from maxmoe.parallel.dispatch.planned_dispatch import PlannedDispatch
from maxmoe.parallel.dispatch.routed_alike import check_routed_alike
from maxmoe.recompute.freed_storage import Recomputation
from maxmoe.sharding.planned_collective import PlannedCollective


class ReplicatedCounts(NamedTuple):
    """Counts of a chunk.

    Attributes:
        plan: plan of the rows of all ranks.
        routed: ``(P,)``, int64 on the host, number of rows for each rank.
    """

    plan: RaggedPlan
    routed: Tensor


@dataclass(frozen=True, kw_only=True)
class ReplicatedDispatched(Dispatched):
    """The input of this rank's experts, with the values that `RaggedAllGather.combine` needs.

    Attributes:
        local: input of the local experts, from the local dispatcher.
        counts: number of rows of every rank.
        all_rows: the plan of the rows of all ranks.
    """

    local: Dispatched
    counts: list[int]
    all_rows: RaggedPlan


@dataclass(frozen=True)
class RaggedAllGather:
    """The ragged strategy for tokens that every rank holds.

    1. Plan: a counting sort of the T * K slots by the rank of their expert, the same on every rank.
    2. Counts: an all-gather of row counts and a checksum verifies that all ranks have the same routing, once for
       all chunks.
    3. Gather: this rank's rows ``(R, D)`` of the tokens ``(T, D)``.
    4. The local dispatcher sorts the rows by expert. The experts compute and weight them: ``(R, D)``.
    5. All-gather: the rows of all ranks, ``(T * K, D)`` without dropped rows.
    6. Unsort: each token sums its K rows, ``(T, D)``.

    Args:
        local: dispatcher to the experts of this rank, with K = 1.
        ranks: the ranks that share the experts, and hold the same tokens.

    Source: MaxText, `ragged_all_to_all` with a replicated batch.
    """

    keeps_sequences: ClassVar[bool] = False
    has_partial_outputs: ClassVar[bool] = False
    moves_experts: ClassVar[bool] = False

    local: Dispatcher[Any, int]
    ranks: ExpertRanks

    def exchange_counts(self, chunks: Sequence[TopK], num_sequences: int) -> list[ReplicatedCounts]:
        """Sort the slots and count the rows per rank: steps 1 and 2. Raises if ranks have routed differently."""
        plans = [self.ranks.plan(chunk) for chunk in chunks]
        counts = torch.cat([torch.cat([plan.group_sizes, _checksum(plan)]) for plan in plans])
        _, host = all_gather_counts(counts, self.ranks.group.group_name)
        check_routed_alike(host)
        routed = host[0].view(len(plans), -1)[:, :-1].view(len(plans), self.ranks.size, -1).sum(2)
        return [ReplicatedCounts(plan, rows) for plan, rows in zip(plans, routed, strict=True)]

    def dispatch(self, x: Tensor, top_k: TopK, counts: ReplicatedCounts) -> Future[ReplicatedDispatched]:
        """Gather this rank's rows of x ``(T, D)``: steps 3 and 4."""
        plan, routed = counts
        max_rows = self.ranks.experts.max_rows(top_k.experts.numel(), self.ranks.buffer_factor)
        accepted: list[int] = (routed if max_rows is None else routed.clamp_max(max_rows)).tolist()
        plan = without_last_rows(plan, routed.tolist(), accepted)
        first = sum(accepted[: self.ranks.group.rank()])
        slots = plan.slots[first : first + accepted[self.ranks.group.rank()]]
        ids = top_k.experts.reshape(-1, 1)[slots]
        weights = weights_of_rows(top_k.weights, slots)
        rows = ragged_gather(x, slots // plan.top_k)
        local: Dispatched = self.local.dispatch(rows, TopK(weights, ids), 1)()
        again = Recomputation(rows, lambda x: lambda: ragged_gather(x(), slots // plan.top_k))
        dispatched = ReplicatedDispatched(
            x=local.x,
            weights=local.weights,
            plan=local.plan,
            dropped=plan.dropped,
            recomputations=(again, *local.recomputations),
            local=local,
            counts=accepted,
            all_rows=plan,
        )
        return lambda: dispatched

    def combine(self, outputs: Tensor, dispatched: ReplicatedDispatched) -> Future[Tensor]:
        """Start the all-gather of the outputs of the experts: steps 5 and 6."""
        weighted = self.local.combine(outputs, dispatched.local)()
        rows = all_gather_replicated_rows(weighted, dispatched.counts, self.ranks.group)
        return lambda: ragged_unsort(rows(), dispatched.all_rows)

    @classmethod
    def dispatcher(cls, layout: ExpertLayout) -> "RaggedAllGather":
        """Make the dispatcher of this process."""
        return cls(layout.local_dispatcher(is_bounded=False), layout.ranks())

    @staticmethod
    def planned_collectives(tokens: PlannedDispatch) -> Iterator[PlannedCollective]:
        """List the collectives of a training step."""
        yield tokens.counts(tokens.num_chunks * (tokens.num_group_experts + 1))
        for chunk in tokens.chunks():
            rows = (chunk.num_rows, chunk.config.row_size)
            yield from chunk.rows("outputs of experts", "all-gather", rows, has_gradient=False)

    @staticmethod
    def planned_saved_tensors(tokens: PlannedDispatch) -> Iterator[SavedTensor]:
        """List the saved tensors of a training step that no module declares, with their shapes on this rank."""
        num_rows = tokens.num_rows // tokens.num_ranks
        # Slots and rows of the plan, and the tokens of this rank's rows.
        yield SavedTensor((tokens.num_rows + tokens.num_slots + num_rows,), (None,), torch.int64)
        yield from tokens.saved_input(num_rows)
        yield from tokens.saved_by_local_dispatcher(num_rows, top_k=1)


def _checksum(plan: RaggedPlan) -> Tensor:
    """Return a checksum ``(1,)`` of the order of the slots; it wraps around, on all ranks alike."""
    place = torch.arange(1, len(plan.slots) + 1, device=plan.slots.device)
    return (plan.slots * place).sum().view(1)
